// Callbacks: the actions of a step as Python calls, with the lock and the thread states for them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <vector>

#include "calls.hpp"
#include "exec/workers.hpp"

namespace pykern {

// Runs the actions of a step as Python calls. Every member is guarded by the interpreter lock.
class Callbacks final : public Client {
   public:
    explicit Callbacks(int num_workers);

    void begin(const Program& program, CallsOfKinds calls, pybind11::object carry);
    // Forgets the step, so that nothing of the user's outlives it; returns what went wrong.
    std::vector<Failure> end();

    // Lets Python handle its signals on the calling thread. An exception from there ends the step,
    // and is raised in the actions under way too, so that a long one does not hold up the user's
    // Ctrl-C. Throws std::runtime_error in a child that a signal handler has forked.
    bool check_signals();
    // The same for an exception that has come to another thread than the one that runs the step.
    void interrupt(pybind11::object exception);
    bool runs(const Program& program) const { return program_ == &program; }

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
        pybind11::object context;
        pybind11::object leave;
    };

    bool fail(std::optional<Action> action, int device);
    void take_interrupt();

    int num_forks_;
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
