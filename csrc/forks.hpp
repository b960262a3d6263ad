// Forks: a process is forked between actions.
//
// A child has only the thread that forks. Locks that another thread held then stay locked in the
// child for ever: those of an import, of a library that manages memory, of a value that C++ makes
// at its first use. A step may hold such a lock. So a fork waits until each worker has ended its
// action and until no thread is in the rest of a step, and both go on behind the fork. The
// interpreter lock, which a fork holds as well, guards everything here.
#pragma once

namespace pykern {

// Whether a thread is in a step: forks of other threads wait meanwhile. With the interpreter lock.
class Presence {
   public:
    static Presence& of_this_thread();

    // Waits as long as another thread forks. May be nested.
    void enter();
    void leave();

    // Forks no longer wait for this thread. By any thread.
    void give_up();

    // For a fork of this thread, which does not wait for itself.
    void begin_fork();
    void end_fork_in_parent();
    static void end_fork_in_child();

   private:
    friend class Absence;

    int leave_for_now();
    void come_back(int depth);

    int depth_ = 0;
    bool counts_ = false;
    int depth_at_fork_ = 0;
};

// Forks do not wait for the thread that made this object, as long as the object lives: the thread
// itself waits for others, which may wait for a fork. Made and destroyed with the interpreter lock.
class [[nodiscard]] Absence {
   public:
    Absence() : depth_(Presence::of_this_thread().leave_for_now()) {}
    Absence(const Absence&) = delete;
    Absence& operator=(const Absence&) = delete;
    ~Absence() { Presence::of_this_thread().come_back(depth_); }

   private:
    int depth_;
};

}  // namespace pykern
