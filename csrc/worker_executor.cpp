#include "worker_executor.hpp"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "exec/kept_lock.hpp"
#include "exec/short_step.hpp"
#include "forks.hpp"
#include "interpreter_lock.hpp"
#include "patience.hpp"

namespace py = pybind11;

namespace pykern {

WorkerExecutor::WorkerExecutor(int num_workers, double timeout_s) : num_workers_(num_workers) {
    const std::chrono::nanoseconds timeout = nanoseconds_of(timeout_s);
    if (timeout.count() > 0) watch(timeout);
    callbacks_ = std::make_unique<Callbacks>(num_workers, timeout.count(), watchdog_.get());
    start();
}

WorkerExecutor::WorkerExecutor(int num_workers, std::unique_ptr<Callbacks> callbacks)
    : num_workers_(num_workers), callbacks_(std::move(callbacks)) {
    start();
}

void WorkerExecutor::start() {
    if (num_workers_ < 1) {
        throw std::invalid_argument("an executor needs at least 1 worker, got " +
                                    std::to_string(num_workers_));
    }
    const Unlocked unlocked;
    workers_ = std::make_unique<Workers>(num_workers_, *callbacks_);
}

// To give the lock back throws only where pybind11 was never set up.
// NOLINTNEXTLINE(bugprone-exception-escape)
WorkerExecutor::~WorkerExecutor() {
    if (claim_.is_fork() || gave_up_ || abandoned_) {
        // The threads stayed in the parent, and their locks may be held; or they hang.
        [[maybe_unused]] const Workers* workers = workers_.release();
        [[maybe_unused]] const Callbacks* callbacks = callbacks_.release();
        [[maybe_unused]] const Watchdog* watchdog = watchdog_.release();
        return;
    }
    const Unlocked unlocked;
    workers_.reset();
    watchdog_.reset();
}

std::vector<Failure> WorkerExecutor::run(WorkerProgram& job, CallsOfKinds calls, py::object carry,
                                         const py::object& begun, const py::object& stalled) {
    refuse_misfit(job.program, calls);
    callbacks_->begin(job.program, std::move(calls), std::move(carry));
    const bool wanted = !begun.is_none();
    const bool may_give_up = !stalled.is_none();
    {
        const Absence absence;
        const Unlocked unlocked;
        // Without a function to call, the lock stays with the workers.
        const auto call_begun = [this, &job, &begun, wanted] {
            if (!wanted) return;
            const Locked lock;
            try {
                begun();
            } catch (const py::error_already_set& error) {
                // Workers are in the step by now: it ends as after any interrupt.
                callbacks_->interrupt(error.value());
                workers_->stop(job);
            }
        };
        try {
            workers_->run(
                job, [this, may_give_up] { return callbacks_->check_signals(may_give_up); },
                call_begun);
        } catch (const Stalled&) {
            abandoned_ = true;
            // No thread waits for the lock on behalf of a step any more.
            watchdog_.reset();
        }
    }
    if (abandoned_) return give_up(job, stalled);
    stay_after_end();
    std::vector<Failure> failures = callbacks_->end();
    renew_after(failures);
    refuse_closed(failures);
    return failures;
}

bool WorkerExecutor::is_short(const WorkerProgram& job) const {
    // A timeout needs a thread that looks at those which act.
    return watchdog_ == nullptr && pykern::is_short(job);
}

std::vector<Failure> WorkerExecutor::run_short(WorkerProgram& job, CallsOfKinds calls) {
    refuse_misfit(job.program, calls);
    callbacks_->begin(job.program, std::move(calls), py::none());
    pykern::run_short(job, *callbacks_, *workers_);
    stay_after_end();
    std::vector<Failure> failures = callbacks_->end();
    refuse_closed(failures);
    return failures;
}

void WorkerExecutor::feed(const WorkerProgram& job, int slot) {
    stay_at_end();
    if (slot < 0 || slot >= job.program.num_slots()) {
        throw std::out_of_range("the program has " + std::to_string(job.program.num_slots()) +
                                " slots, got " + std::to_string(slot));
    }
    workers_->feed(job, slot);
}

void WorkerExecutor::stop(const WorkerProgram& job, py::object exception) {
    // The threads that hold the locks stayed in the parent.
    if (claim_.is_fork()) return;
    if (!exception.is_none() && callbacks_->runs(job.program)) {
        callbacks_->interrupt(std::move(exception));
    }
    workers_->stop(job);
}

void WorkerExecutor::close() {
    if (claim_.is_fork() || abandoned_) return;
    if (workers_->is_worker() || claim_.is_mine()) {
        throw std::runtime_error(
            "a stage or a signal handler cannot close the pipeline that runs it");
    }
    claim_.close();
    workers_->begin_to_close();
    gave_up_ = true;
    // Waits until the step's caller has come back for the lock and has left, since at exit the
    // interpreter goes down next.
    const py::object raised =
        claim_.wait([this](const py::object& exception) { callbacks_->interrupt(exception); });
    gave_up_ = false;
    {
        const Unlocked unlocked;
        workers_->close();
    }
    if (raised) raise_exception(raised);
}

// Has a watchdog look at waits for the interpreter lock.
void WorkerExecutor::watch(std::chrono::nanoseconds timeout) {
    const auto tell = [this](std::int64_t ns) {
        const std::vector<UnderWay> under_way = callbacks_->under_way();
        return tell_kept_lock(workers_->program(), ns, under_way, waiting(under_way));
    };
    watchdog_ = watching<Watchdog>(timeout, STDERR_FILENO, tell);
}

// The next action of each row that waits, besides the actions that are under way.
std::vector<Workers::Waiting> WorkerExecutor::waiting(
    const std::vector<UnderWay>& under_way) const {
    std::vector<Position> positions;
    positions.reserve(under_way.size());
    for (const UnderWay& one : under_way) positions.push_back(one.position);
    return workers_->waiting(positions);
}

// Leaves the workers, whose actions do not end, to themselves. Returns the failure to raise.
std::vector<Failure> WorkerExecutor::give_up(WorkerProgram& job, const py::object& stalled) {
    const std::vector<UnderWay> under_way = callbacks_->under_way();
    const Program& program = job.program;
    const auto told = [&program](Position position) {
        return py::make_tuple(program.action(position), program.device_of(position));
    };
    py::list acting;
    for (const UnderWay& one : under_way) {
        const double seconds = static_cast<double>(one.ns) * 1e-9;
        acting.append(py::make_tuple(told(one.position), seconds, one.thread_id));
    }
    py::list rows;
    for (const auto& [next, lacking] : waiting(under_way)) {
        py::list inputs;
        for (const Position input : lacking) inputs.append(told(input));
        rows.append(py::make_tuple(told(next), inputs));
    }
    py::object error;
    try {
        error = stalled(acting, rows);
    } catch (const py::error_already_set& another) {
        // One more interrupt.
        error = another.value();
    }
    claim_.close(": a stage has not come back from an action (PipelineStalled); make a new one");
    // The error has the stacks. From now on workers may come back.
    callbacks_->abandon();
    workers_->abandon();
    // Workers look up its actions when they come back.
    py::cast(&job).release();
    const std::vector<Failure> failures = callbacks_->end();
    if (!failures.empty()) {
        PyException_SetCause(error.ptr(),
                             py::object(std::get<2>(failures.front())).release().ptr());
    }
    if (under_way.empty()) return {{std::nullopt, 0, error}};
    const Position longest = under_way.front().position;
    return {{program.action(longest), program.device_of(longest), error}};
}

// An interrupt reaches workers between any two instructions, also while torch enters or leaves
// a mode. The remains of such a mode go with the threads.
void WorkerExecutor::renew_after(std::vector<Failure>& failures) {
    const auto is_interrupt = [](const Failure& failure) { return std::get<1>(failure) < 0; };
    if (std::ranges::none_of(failures, is_interrupt)) return;
    std::string refused;
    {
        const Unlocked unlocked;
        try {
            workers_->renew();
        } catch (const std::runtime_error& error) {
            refused = error.what();
        }
    }
    if (refused.empty()) return;
    claim_.close();
    failures.emplace_back(
        std::nullopt, -1,
        py::module_::import("builtins").attr("RuntimeError")("the pipeline is closed: " + refused));
}

void WorkerExecutor::refuse_closed(const std::vector<Failure>& failures) const {
    if (failures.empty() && workers_->closed()) {
        throw std::runtime_error("the pipeline was closed while it ran a step");
    }
}

void WorkerExecutor::refuse_misfit(const Program& program, const CallsOfKinds& calls) {
    if (!claim_.is_mine()) throw std::logic_error("run needs a claim");
    if (program.num_devices() > num_workers_) {
        throw std::invalid_argument("the program needs " + std::to_string(program.num_devices()) +
                                    " workers, the executor has " + std::to_string(num_workers_));
    }
    require_calls(program.placement(), program.num_slices(), program.held(), calls);
}

}  // namespace pykern
