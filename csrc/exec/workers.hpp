// Workers: the CPU driver. One thread per device runs the actions of a program as they become
// ready.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "exec/pace.hpp"
#include "exec/program.hpp"
#include "exec/trace.hpp"

namespace pykern {

// Performs the actions that workers run. Each worker calls these on its own thread, in the order
//   attach  ( enter  ( resume run suspend )*  leave )*  detach
// The worker also calls resume before leave, and suspend after it. It calls enter after the first
// resume of a step. A short step calls enter, run and leave of worker 0 on the caller's thread.
class Client {
   public:
    Client() = default;
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    virtual ~Client() = default;

    virtual void attach(int worker) noexcept = 0;
    virtual void detach(int worker) noexcept = 0;
    // Takes the lock that actions need, and gives it back: the interpreter lock.
    virtual void resume(int worker) noexcept = 0;
    virtual void suspend(int worker) noexcept = 0;
    // Before the first and after the last action of a step on this worker. False from enter fails
    // the step.
    virtual bool enter(int worker) noexcept = 0;
    virtual void leave(int worker) noexcept = 0;
    // Performs the action. False fails the step: no further action starts.
    virtual bool run(int worker, Position position) noexcept = 0;
};

// A program with the trace of its last steps, which tells when each action began and ended, and
// their pace, which tells how long an action takes and so whether it is short.
struct WorkerProgram {
    explicit WorkerProgram(const Plan& plan) : WorkerProgram(Program(plan)) {}
    explicit WorkerProgram(Program made)
        : program(std::move(made)), trace(program.num_actions()), pace(program.num_stages()) {}

    Program program;
    Trace trace;
    Pace pace;
};

// Has the client run an action of the job, with a range around it, and takes its time.
bool run_timed(WorkerProgram& job, Client& client, int worker, Position position);

// A step is a wave of ready actions. Each action has a join counter of inputs that have not run.
// The worker that takes the last input away has the action run: on its own thread if the device is
// its own, or if the action is too short to wake the device's thread for, else by a post to that
// thread. In a program that issues, a short action does not stay, and one of no row always does. A
// row is a chain, so a device has at most one ready action.
//
// The step of an endless program goes on until `stop`. A counter that reaches zero is set again for
// the next round. A device runs its ready actions, of several stages, in the order of their posts.
//
//     WorkerProgram job(plan);
//     Workers workers(plan.num_devices(), client);
//     workers.run(job, [] { return false; });
//
// Threads: any thread may call run, feed, stop and close, but only one at a time may call run. The
// workers call everything else.
class Workers {
   public:
    // Throws std::runtime_error when the system refuses a thread, after the end of those that it
    // did not refuse. The caller must not hold the lock that `resume` takes.
    Workers(int num_workers, Client& client);
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;
    ~Workers() { close(); }

    // Runs every action of the job, or until an action fails or `interrupted` returns true, which
    // the caller's thread asks every 20 ms. On return no worker is inside the client. The caller
    // must not hold the lock that `resume` takes. Calls `begun`, which must not throw, once feed
    // and stop have an effect. An exception of `interrupted` comes out at once. After it only
    // `waiting` and `abandon` may be called.
    void run(
        WorkerProgram& job, const std::function<bool()>& interrupted,
        const std::function<void()>& begun = [] {});

    // For the step of an endless program. Without effect when the step is over. The last round of
    // the slot must be through.
    void feed(const WorkerProgram& job, int slot);
    // No further action starts.
    void stop(const WorkerProgram& job);

    // The program of the step in progress. By the threads that may call `waiting`.
    const Program& program() const { return job_->program; }
    // The next action of a row, and those of its inputs that have not run. Without such inputs the
    // action waits for a worker that is in another action.
    struct Waiting {
        Position position;
        std::vector<Position> inputs;
    };
    // For each row that is not through, without the actions that are under way. Empty for an
    // endless program, which has no rows. By the thread that runs the step or has run it last, or
    // by another one while that thread is held up in `interrupted`.
    std::vector<Waiting> waiting(const std::vector<Position>& under_way) const;
    // Leaves the threads to themselves, behind a run that has thrown. Each thread ends when it
    // comes back. The client and the job must live as long as the process, as must this object.
    void abandon();

    // Ends the threads and begins new ones, between steps. Throws as the constructor does. The
    // workers are closed then.
    void renew();

    // No further action starts, and later runs do nothing.
    void begin_to_close();
    // The same, and joins the threads, so that a running step ends. Not from a worker.
    void close();
    bool closed() const { return closing_.load(std::memory_order_relaxed); }

    // Whether the calling thread is one of these workers.
    bool is_worker() const;

   private:
    // Guarded by its mutex. Served in the order of the members.
    struct Mailbox {
        std::mutex mutex;
        std::condition_variable filled;
        std::deque<Position> posted;
        bool leave = false;
        bool close = false;
    };
    class Ready;

    void start();
    void join();
    void loop(int worker);
    void run_ready(int worker, Position first);
    bool run_action(int worker, Position position);
    void release(int worker, Position position, Ready& ready);
    bool may_stay(int worker, Position position) const;
    void post(Position position);
    void leave(int worker);
    void finish(int worker);
    bool is_ready(Position position);
    bool stopped() const;
    void fail();
    void wait_for_step(const std::function<bool()>& interrupted);
    void call_out();

    Client& client_;
    std::vector<std::unique_ptr<Mailbox>> mailboxes_;
    std::vector<std::thread> threads_;

    std::mutex run_mutex_;  // held by run for the length of a step
    std::atomic<bool> closing_{false};

    // The step in progress. Written by run before anything is posted.
    WorkerProgram* job_ = nullptr;
    std::vector<std::atomic<int>> waiting_for_;  // join counter of each action
    std::vector<char> entered_;                  // per worker; its own until the step is over
    std::atomic<int> unfinished_{0};  // actions handed to a worker and not yet dealt with
    std::atomic<bool> stopped_{false};

    std::mutex done_mutex_;
    std::condition_variable done_;
    bool finished_ = false;  // guarded by done_mutex_
    bool endless_ = false;   // may be fed, and counts as unfinished; guarded by done_mutex_
    int num_inside_ = 0;     // workers that entered and must leave; guarded by done_mutex_
};

}  // namespace pykern
