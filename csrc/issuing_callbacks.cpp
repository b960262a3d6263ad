#include "issuing_callbacks.hpp"

#include <pybind11/stl.h>

#include <utility>

#include "ending.hpp"
#include "transfers.hpp"

namespace py = pybind11;

namespace pykern {

void IssuingCallbacks::begin_issue(Dispatch& dispatch, const IssuingProgram& program) {
    dispatch_ = &dispatch;
    program_ = &program;
    error_ = nullptr;
}

void IssuingCallbacks::rethrow() {
    const std::scoped_lock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
}

template <class Call>
auto IssuingCallbacks::with_lock(int worker, const Call& call) {
    Callbacks::resume(worker);
    const auto result = call();
    Callbacks::suspend(worker);
    return result;
}

bool IssuingCallbacks::enter(int worker) noexcept {
    return with_lock(worker, [&] { return Callbacks::enter(worker); });
}

void IssuingCallbacks::leave(int worker) noexcept {
    with_lock(worker, [&] {
        Callbacks::leave(worker);
        return true;
    });
}

bool IssuingCallbacks::run(int /*worker*/, Position position) noexcept {
    try {
        // Another context may be current, of a copy that this thread has issued.
        cuda::CUcontext current = nullptr;
        return dispatch_->issue(program_->task(position), current);
    } catch (...) {
        const std::scoped_lock lock(mutex_);
        if (!error_) error_ = std::current_exception();
    }
    return false;
}

bool IssuingCallbacks::run(TaskNumber task, Transfers& transfers) noexcept {
    const Position position = program_->position(task);
    const int worker = program_->program().program.device_of(position);
    return with_lock(worker, [&] {
        const py::object result = call(worker, position);
        if (!result) return false;
        try {
            transfers = transfers_returned(result);
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
            return fail(program_->program().program.action(position), worker);
        }
        return true;
    });
}

Issuers::Issuers(int num_lanes)
    : Issuers(std::make_unique<IssuingCallbacks>(num_lanes), num_lanes) {}

Issuers::Issuers(std::unique_ptr<IssuingCallbacks> callbacks, int num_lanes)
    : callbacks_(callbacks.get()),
      executor_(std::make_shared<WorkerExecutor>(num_lanes, std::move(callbacks))) {
    close_before_end(executor_);
}

std::vector<Failure> Issuers::issue(Dispatch& dispatch, IssuingProgram& program,
                                    const CallsOfKinds& calls, const py::object& carry) {
    callbacks_->begin_issue(dispatch, program);
    std::vector<Failure> failures =
        executor_->run(program.program(), calls, carry, py::none(), py::none());
    callbacks_->rethrow();
    return failures;
}

}  // namespace pykern
