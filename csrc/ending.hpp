// Ending: executors end before the interpreter does.
//
// Python ends a thread that asks for the interpreter lock while Python goes down, and torch's C++
// does not survive that. So executors close before Python goes down, after all atexit
// handlers have run, and threads that come from a step stay here. An atexit handler may make a
// pipeline and run it. So executors are not closed by a handler, but by the destructor of a
// handler, which atexit frees after it has called the last one.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <vector>

namespace pykern {

// An object that must close before the interpreter ends.
class Closable {
   public:
    Closable() = default;
    Closable(const Closable&) = delete;
    Closable& operator=(const Closable&) = delete;
    virtual ~Closable() = default;

    // Stops the step that runs and waits for its end. With the interpreter lock. Leaves no Python
    // exception set.
    virtual void close_at_end() noexcept = 0;
    // The threads that have run a step, by their numbers in the system.
    virtual std::vector<pid_t> callers() = 0;
};

// Calls a function that closes an object at the end. Python prints an interrupt of the call as an
// exception that it cannot raise.
void close_silently(const std::function<void()>& close) noexcept;

// The object will be closed before the interpreter ends. With the interpreter lock. Throws
// std::runtime_error when the interpreter has ended.
void close_before_end(const std::weak_ptr<Closable>& closable);

// For a thread that begins or feeds a step, with the interpreter lock. While Python goes down, the
// call returns only to the thread that takes Python down.
void stay_at_end();

// The same for a thread that comes from a step, which has some time to leave first.
void stay_after_end();

// In the child of a fork: the end that had begun was the parent's, and the threads are the
// parent's.
void begin_anew_in_child();

// For a thread that nobody joins, without the interpreter lock, before the thread ends. Destructors
// of its thread-local objects may ask for that lock, as torch's do, so Python waits for its end, or
// while Python goes down the thread stays.
void end_unjoined();

}  // namespace pykern
