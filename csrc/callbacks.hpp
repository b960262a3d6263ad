// Callbacks: the actions of a step as Python calls, with the lock and the thread states for them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "calls.hpp"
#include "exec/workers.hpp"

namespace pykern {

// Thrown by `check_signals` where waiting for the end of a step has no hope.
class Stalled : public std::exception {};

// An action that a worker has not ended, for how long, and which of Python's threads the worker is.
struct UnderWay {
    Position position;
    std::int64_t ns;
    unsigned long thread_id;
};

// Runs the actions of a step as Python calls. Every member is guarded by the interpreter lock.
class Callbacks final : public Client {
   public:
    // A step whose action takes longer than `timeout_ns` has stalled; 0: no time is too long.
    Callbacks(int num_workers, std::int64_t timeout_ns);

    void begin(const Program& program, CallsOfKinds calls, pybind11::object carry);
    // Forgets the step, so that nothing of the user's outlives it; returns what went wrong.
    std::vector<Failure> end();

    // Lets Python handle its signals on the calling thread. An exception from there ends the step,
    // and is raised in the actions under way too, so that a long one does not hold up the user's
    // Ctrl-C. Throws std::runtime_error in a child that a signal handler has forked, and Stalled
    // where an action takes too long, or goes on behind a second interrupt, if it may be given up.
    bool check_signals(bool may_give_up);
    // The same for an exception that has come to another thread than the one that runs the step.
    void interrupt(pybind11::object exception);
    bool runs(const Program& program) const { return program_ == &program; }
    // What workers are in, the longest first.
    std::vector<UnderWay> under_way() const;
    // The workers are left to themselves: those that come back from an action do nothing any more.
    void abandon();

    void attach(int worker) noexcept override;
    void detach(int worker) noexcept override;
    void resume(int worker) noexcept override;
    void suspend(int worker) noexcept override;
    bool enter(int worker) noexcept override;
    void leave(int worker) noexcept override;
    bool run(int worker, Position position) noexcept override;

   private:
    struct Worker {
        PyThreadState* state = nullptr;
        unsigned long thread_id = 0;
        bool acting = false;
        Position position = 0;     // while acting
        std::uint64_t number = 0;  // of the action, among all that the worker has begun
        // Which action was seen last, and when first. Seen every few milliseconds only: an action
        // reads no clock for it.
        std::uint64_t seen = 0;
        std::int64_t since_ns = 0;
        pybind11::object context;
        pybind11::object leave;
    };

    bool fail(std::optional<Action> action, int device);
    bool is_hopeless();
    void take_interrupt();

    int num_forks_;
    std::int64_t timeout_ns_;
    int num_interrupts_ = 0;
    std::int64_t last_interrupt_ns_ = 0;
    bool abandoned_ = false;
    pybind11::object nothing_;  // a function of Python's that does nothing
    std::vector<Worker> workers_;
    const Program* program_ = nullptr;
    std::array<std::vector<pybind11::object>, kNumKinds> calls_;
    pybind11::object carry_;
    pybind11::object context_;
    bool interrupted_ = false;
    std::vector<Failure> failures_;
};

}  // namespace pykern
