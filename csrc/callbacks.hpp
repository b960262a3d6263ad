// Callbacks: the actions of a step as Python calls, with the lock and the thread states for them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "calls.hpp"
#include "exec/kept_lock.hpp"
#include "exec/watchdog.hpp"
#include "exec/workers.hpp"
#include "forks.hpp"

namespace pykern {

// `check_signals` throws this where nobody can expect the step to end.
class Stalled : public std::exception {};

// Runs the actions of a step as Python calls. The interpreter lock guards every member, except
// those that say otherwise.
class Callbacks : public Client {
   public:
    // A step whose action takes longer than `timeout_ns` has stalled. 0: no time is too long.
    // A watchdog, if there is one, looks at waits for the interpreter lock.
    Callbacks(int num_workers, std::int64_t timeout_ns, Watchdog* watchdog);

    // With None for `carry`, the thread that calls this runs the actions itself.
    void begin(const Program& program, CallsOfKinds calls, pybind11::object carry);
    // Forgets the step, so that no object of the user outlives the step. Returns the failures.
    std::vector<Failure> end();

    // Lets Python handle its signals on the calling thread. An exception of a handler ends the
    // step, and interrupts the actions under way, so that a long action does not hold up the user's
    // Ctrl-C. Throws std::runtime_error in a child that a signal handler has forked. If the step
    // may be given up, throws Stalled where an action takes too long, or goes on behind a second
    // interrupt.
    bool check_signals(bool may_give_up);
    // Does the same for an exception of another thread than the one that runs the step.
    void interrupt(pybind11::object exception);
    bool runs(const Program& program) const { return program_ == &program; }
    // The actions that have not ended, the longest first. With the interpreter lock, or while the
    // thread that runs the step waits for that lock.
    std::vector<UnderWay> under_way() const;
    // Leaves the workers to themselves: a worker that comes back from an action does nothing more.
    void abandon();

    void attach(int worker) noexcept override;
    void detach(int worker) noexcept override;
    void resume(int worker) noexcept override;
    void suspend(int worker) noexcept override;
    bool enter(int worker) noexcept override;
    void leave(int worker) noexcept override;
    bool run(int worker, Position position) noexcept override;

   protected:
    // Calls what an action is, on its worker, with the interpreter lock. Null where it has failed.
    pybind11::object call(int worker, Position position);
    bool fail(std::optional<Action> action, int device);

   private:
    struct Worker {
        PyThreadState* state = nullptr;
        // The worker alone writes these four, with the interpreter lock. They are atomic for who
        // looks without the lock. Relaxed: whoever looks either has the lock or knows that it does
        // not change hands, and reads nothing else through them.
        std::atomic<unsigned long> thread_id = 0;  // that entered the step in the worker's name
        std::atomic<bool> acting = false;
        std::atomic<Position> position = 0;     // while acting
        std::atomic<std::uint64_t> number = 0;  // of the action, among all the worker has begun
        // The action that the thread which runs the step saw last, and when it saw that one first.
        // That thread looks every few milliseconds, so that an action does not read a clock.
        std::uint64_t seen = 0;
        std::int64_t since_ns = 0;
        Presence* presence = nullptr;  // of the thread
        pybind11::object context;
        pybind11::object leave;
    };

    bool runs_on_caller() const { return carry_.is_none(); }
    void look();
    void interrupt_actions();
    bool is_hopeless();
    void take_interrupt();

    int num_forks_;
    std::int64_t timeout_ns_;
    Watchdog* watchdog_;
    int num_interrupts_ = 0;
    std::int64_t last_interrupt_ns_ = 0;
    bool abandoned_ = false;
    pybind11::object nothing_;  // a Python function that does nothing
    std::vector<Worker> workers_;
    const Program* program_ = nullptr;
    std::array<std::vector<pybind11::object>, kNumKinds> calls_;
    pybind11::object carry_;
    pybind11::object context_;
    bool interrupted_ = false;
    std::vector<Failure> failures_;
};

}  // namespace pykern
