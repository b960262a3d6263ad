// Python's side of the executor: the interpreter lock, callables, exceptions and contexts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "callbacks.hpp"
#include "calls.hpp"
#include "ending.hpp"
#include "exec/kept_lock.hpp"
#include "exec/torch_range.hpp"
#include "exec/watchdog.hpp"
#include "exec/workers.hpp"
#include "forks.hpp"
#include "interpreter_lock.hpp"
#include "patience.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// The executor as Python sees it: a set of workers with their callbacks, bound to one process.
class WorkerExecutor final : public Closable {
   public:
    WorkerExecutor(int num_workers, double timeout_s) : num_workers_(num_workers) {
        if (num_workers < 1) {
            throw std::invalid_argument("an executor needs at least 1 worker, got " +
                                        std::to_string(num_workers));
        }
        const std::chrono::nanoseconds timeout = nanoseconds_of(timeout_s);
        if (timeout.count() > 0) watch(timeout);
        callbacks_ = std::make_unique<Callbacks>(num_workers, timeout.count(), watchdog_.get());
        const Unlocked unlocked;
        workers_ = std::make_unique<Workers>(num_workers, *callbacks_);
    }

    WorkerExecutor(const WorkerExecutor&) = delete;
    WorkerExecutor& operator=(const WorkerExecutor&) = delete;

    // To give the lock back throws only where pybind11 was never set up.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    ~WorkerExecutor() override {
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

    static std::unique_ptr<HeldClaim> claim(const std::shared_ptr<WorkerExecutor>& self) {
        return std::make_unique<HeldClaim>(std::shared_ptr<Claim>(self, &self->claim_));
    }

    std::vector<Failure> run(WorkerProgram& job, CallsOfKinds calls, py::object carry,
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
        if (failures.empty() && workers_->closed()) {
            throw std::runtime_error("the pipeline was closed while it ran a step");
        }
        return failures;
    }

    void feed(const WorkerProgram& job, int slot) {
        stay_at_end();
        if (slot < 0 || slot >= job.program.num_slots()) {
            throw std::out_of_range("the program has " + std::to_string(job.program.num_slots()) +
                                    " slots, got " + std::to_string(slot));
        }
        workers_->feed(job, slot);
    }

    void stop(const WorkerProgram& job, py::object exception) {
        // The threads that hold the locks stayed in the parent.
        if (claim_.is_fork()) return;
        if (!exception.is_none() && callbacks_->runs(job.program)) {
            callbacks_->interrupt(std::move(exception));
        }
        workers_->stop(job);
    }

    void close() {
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

    void close_at_end() noexcept override {
        close_silently([this] { close(); });
    }

    std::vector<pid_t> callers() override { return claim_.callers(); }

   private:
    // Has a watchdog look at waits for the interpreter lock.
    void watch(std::chrono::nanoseconds timeout) {
        const auto tell = [this](std::int64_t ns) {
            const std::vector<UnderWay> under_way = callbacks_->under_way();
            return tell_kept_lock(workers_->program(), ns, under_way, waiting(under_way));
        };
        watchdog_ = watching<Watchdog>(timeout, STDERR_FILENO, tell);
    }

    // The next action of each row that waits, besides the actions that are under way.
    std::vector<Workers::Waiting> waiting(const std::vector<UnderWay>& under_way) const {
        std::vector<Position> positions;
        positions.reserve(under_way.size());
        for (const UnderWay& one : under_way) positions.push_back(one.position);
        return workers_->waiting(positions);
    }

    // Leaves the workers, whose actions do not end, to themselves. Returns the failure to raise.
    std::vector<Failure> give_up(WorkerProgram& job, const py::object& stalled) {
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
        claim_.close(
            ": a stage has not come back from an action (PipelineStalled); make a new one");
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
    void renew_after(std::vector<Failure>& failures) {
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
        failures.emplace_back(std::nullopt, -1,
                              py::module_::import("builtins")
                                  .attr("RuntimeError")("the pipeline is closed: " + refused));
    }

    void refuse_misfit(const Program& program, const CallsOfKinds& calls) {
        if (!claim_.is_mine()) throw std::logic_error("run needs a claim");
        if (program.num_devices() > num_workers_) {
            throw std::invalid_argument(
                "the program needs " + std::to_string(program.num_devices()) +
                " workers, the executor has " + std::to_string(num_workers_));
        }
        require_calls(program.placement(), program.num_slices(), program.held(), calls);
    }

    int num_workers_;
    Claim claim_;
    bool gave_up_ = false;                  // closing, while a step goes on
    bool abandoned_ = false;                // by the step that ran last
    std::unique_ptr<Watchdog> watchdog_;    // with a timeout
    std::unique_ptr<Callbacks> callbacks_;  // after watchdog_, which it uses
    std::unique_ptr<Workers> workers_;      // after callbacks_, which its threads use
};

void bind_program(py::module_& module) {
    py::class_<WorkerProgram>(module, "WorkerProgram",
                              "A checked plan, ready to run, with the trace of its last steps.")
        .def(py::init<const Plan&>(), py::arg("plan"))
        .def_static(
            "part",
            [](const Plan& plan, const std::vector<std::size_t>& begins,
               const std::vector<std::size_t>& ends) {
                return std::make_unique<WorkerProgram>(Program::part(plan, begins, ends));
            },
            py::arg("plan"), py::arg("begins"), py::arg("ends"),
            "The actions between two positions of each row. Actions before those count as done. "
            "Raises ValueError if an action needs one behind the part.")
        .def_static(
            "endless",
            [](const Placement& placement, int num_slots) {
                return std::make_unique<WorkerProgram>(Program::endless(placement, num_slots));
            },
            py::arg("placement"), py::arg("num_slots"),
            "Forwards of microbatches, of which feed() lets one after another into the next slot.")
        .def(
            "timeline",
            [](const WorkerProgram& job, std::size_t ago) {
                return job.trace.timeline(job.program, ago);
            },
            py::arg("ago") = 0,
            "When each action ran, in the step `ago` steps before the last one.");
}

void bind_executor(py::module_& module) {
    py::class_<HeldClaim>(module, "HeldClaim", "A context, at whose end an executor is free again.")
        .def("__enter__", [](HeldClaim&) {})
        .def("__exit__", [](HeldClaim& self, const py::args&) { self.release(); });
    py::class_<WorkerExecutor, std::shared_ptr<WorkerExecutor>>(
        module, "WorkerExecutor", "Worker threads that run programs, one thread for each device.")
        .def(py::init([](int num_workers, double timeout_s) {
                 stay_at_end();
                 auto made = std::make_shared<WorkerExecutor>(num_workers, timeout_s);
                 close_before_end(made);
                 return made;
             }),
             py::arg("num_workers"), py::arg("timeout_s") = 0.0,
             "Raises RuntimeError when the system refuses a thread. A step whose action takes "
             "longer than the timeout has stalled. 0: no time is too long. Where a call in C keeps "
             "the interpreter lock for so long, a message on stderr says so.")
        .def("claim", &WorkerExecutor::claim,
             "Takes the executor for one step, until the end of the context that it gives. Raises "
             "RuntimeError when the executor cannot run a step.")
        .def(
            "run", &WorkerExecutor::run, py::arg("program"), py::arg("callbacks"), py::arg("carry"),
            py::arg("begun") = py::none(), py::arg("stalled") = py::none(),
            "Runs a step: calls callbacks[kind][replica * num_stages + stage](microbatch) as the "
            "program says. Each worker calls carry() before its first call, and what carry() "
            "returned after its last call. Returns the failures in the order of their times, as "
            "(action, device, exception); an empty list if everything ran. The step of an endless "
            "program lasts until stop(); the executor calls begun() once feed() may be called. If "
            "an action takes too long, or goes on behind a second interrupt, the executor abandons "
            "the workers and runs no further step. The exception is then that of stalled(acting, "
            "rows). acting: the actions that do not end, as ((action, device), seconds, thread), "
            "the longest first. rows: the next action of each row that waits, and the inputs that "
            "have not run.")
        .def("feed", &WorkerExecutor::feed, py::arg("program"), py::arg("slot"),
             "Lets the next slot of an endless program go through the stages. The last round of "
             "the slot must be through. Without effect if the program no longer runs.")
        .def("stop", &WorkerExecutor::stop, py::arg("program"), py::arg("exception") = py::none(),
             "Lets no further action of an endless program start. An exception interrupts the "
             "actions under way, and run() returns that exception. Without effect if the program "
             "does not run.")
        .def("close", &WorkerExecutor::close,
             "Stops a step that runs in another thread, waits for its end, and ends the workers. "
             "The interpreter does the same before it ends.");
}

void bind_torch_ranges(py::module_& module) {
    module.def(
        "set_torch_ranges",
        [](std::uintptr_t start, std::uintptr_t end, bool sees_workers) {
            // Functions come from ctypes as numbers.
            // NOLINTBEGIN(performance-no-int-to-ptr)
            TorchRange::reach(reinterpret_cast<TorchRangeStart>(start),
                              reinterpret_cast<TorchRangeEnd>(end), sees_workers);
            // NOLINTEND(performance-no-int-to-ptr)
        },
        py::arg("start"), py::arg("end"), py::arg("sees_workers"),
        "Has the ranges of actions and steps that begin from now on reach torch.profiler, by these "
        "functions of its C interface; not if `start` is 0. sees_workers: whether the profile has "
        "threads other than the caller's. If not, the caller tells at the end of a step when "
        "workers have run which action.");
}

}  // namespace

void bind_exec(py::module_& module) {
    bind_program(module);
    bind_executor(module);
    bind_torch_ranges(module);
}

}  // namespace pykern
