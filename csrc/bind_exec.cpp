// Python's side of the executor: the interpreter lock, callables, exceptions and contexts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
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
#include "exec/ranges.hpp"
#include "exec/workers.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// The executor as Python sees it: a set of workers with their callbacks, bound to one process.
class Executor final : public Closable {
   public:
    Executor(int num_workers, double timeout_s) : num_workers_(num_workers) {
        if (num_workers < 1) {
            throw std::invalid_argument("an executor needs at least 1 worker, got " +
                                        std::to_string(num_workers));
        }
        const auto timeout_ns = static_cast<std::int64_t>(std::min(timeout_s, kLongestS) * 1e9);
        callbacks_ = std::make_unique<Callbacks>(num_workers, timeout_ns);
        const py::gil_scoped_release no_gil;
        workers_ = std::make_unique<Workers>(num_workers, *callbacks_);
    }

    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Giving the lock back throws only where pybind11 was never set up.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    ~Executor() override {
        if (claim_.is_fork() || gave_up_ || abandoned_) {
            // The threads stayed in the parent, and their locks may be held; or they hang.
            [[maybe_unused]] const Workers* workers = workers_.release();
            [[maybe_unused]] const Callbacks* callbacks = callbacks_.release();
            return;
        }
        const py::gil_scoped_release no_gil;
        workers_.reset();
    }

    void claim() { claim_.take(); }
    void release() { claim_.release(); }

    std::vector<Failure> run(Job& job, CallsOfKinds calls, py::object carry,
                             const py::object& begun, const py::object& stalled) {
        refuse_misfit(job.program, calls);
        callbacks_->begin(job.program, std::move(calls), std::move(carry));
        const bool wanted = !begun.is_none();
        const bool may_give_up = !stalled.is_none();
        {
            const py::gil_scoped_release no_gil;
            // Steps that nobody wants to be told of do not take the lock from the workers.
            const auto call_begun = [&begun, wanted] {
                if (!wanted) return;
                const py::gil_scoped_acquire gil;
                begun();
            };
            try {
                workers_->run(
                    job, [this, may_give_up] { return callbacks_->check_signals(may_give_up); },
                    call_begun);
            } catch (const Stalled&) {
                abandoned_ = true;
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

    void feed(const Job& job, int slot) {
        stay_at_end();
        if (slot < 0 || slot >= job.program.num_slots()) {
            throw std::out_of_range("the program has " + std::to_string(job.program.num_slots()) +
                                    " slots, got " + std::to_string(slot));
        }
        workers_->feed(job, slot);
    }

    void stop(const Job& job, py::object exception) {
        // Whoever holds the locks has stayed in the parent.
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
        // Until the step's caller has come back for the lock and left, since at exit the
        // interpreter goes down next.
        const py::object raised =
            claim_.wait([this](const py::object& exception) { callbacks_->interrupt(exception); });
        gave_up_ = false;
        {
            const py::gil_scoped_release no_gil;
            workers_->close();
        }
        if (raised) raise_exception(raised);
    }

    void close_at_end() noexcept override {
        close_silently([this] { close(); });
    }

    std::vector<pid_t> callers() override { return claim_.callers(); }

   private:
    // The longest wait that fits into nanoseconds with room to spare.
    static constexpr double kLongestS = 1e9;

    // Leaves the workers, whose actions do not end, to themselves; returns what there is to say.
    std::vector<Failure> give_up(Job& job, const py::object& stalled) {
        const std::vector<UnderWay> under_way = callbacks_->under_way();
        const Program& program = job.program;
        const auto told = [&program](Position position) {
            return py::make_tuple(program.action(position), program.device_of(position));
        };
        py::list acting;
        std::vector<Position> positions;
        for (const UnderWay& one : under_way) {
            positions.push_back(one.position);
            const double seconds = static_cast<double>(one.ns) * 1e-9;
            acting.append(py::make_tuple(told(one.position), seconds, one.thread_id));
        }
        py::list rows;
        for (const auto& [next, lacking] : workers_->waiting(positions)) {
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
        // Stacks have been looked at; from now on workers may come back.
        callbacks_->abandon();
        workers_->abandon();
        // Its actions are looked up by workers, whenever they come back.
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
    // a mode. What that left behind goes with the threads.
    void renew_after(std::vector<Failure>& failures) {
        const auto is_interrupt = [](const Failure& failure) { return std::get<1>(failure) < 0; };
        if (std::ranges::none_of(failures, is_interrupt)) return;
        std::string refused;
        {
            const py::gil_scoped_release no_gil;
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
    bool gave_up_ = false;    // closing, while a step goes on
    bool abandoned_ = false;  // by the step that ran last
    std::unique_ptr<Callbacks> callbacks_;
    std::unique_ptr<Workers> workers_;  // after callbacks_, which its threads use
};

void bind_program(py::module_& module) {
    py::class_<Job>(module, "Program",
                    "A checked plan, ready to run, with the trace of its last steps.")
        .def(py::init<const Plan&>(), py::arg("plan"))
        .def_static(
            "part",
            [](const Plan& plan, const std::vector<std::size_t>& begins,
               const std::vector<std::size_t>& ends) {
                return std::make_unique<Job>(Program::part(plan, begins, ends));
            },
            py::arg("plan"), py::arg("begins"), py::arg("ends"),
            "What stands between two positions of each row. What stands before counts as done; "
            "raises ValueError where an action needs one that stands behind.")
        .def_static(
            "endless",
            [](const Placement& placement, int num_slots) {
                return std::make_unique<Job>(Program::endless(placement, num_slots));
            },
            py::arg("placement"), py::arg("num_slots"),
            "Forwards of microbatches that are fed one after another, each to the next slot.")
        .def(
            "timeline",
            [](const Job& job, std::size_t ago) { return job.trace.timeline(job.program, ago); },
            py::arg("ago") = 0, "What ran when, in the step `ago` steps before the last one.");
}

void bind_executor(py::module_& module) {
    py::class_<Executor, std::shared_ptr<Executor>>(
        module, "Executor", "Worker threads that run programs, one device each.")
        .def(py::init([](int num_workers, double timeout_s) {
                 stay_at_end();
                 auto made = std::make_shared<Executor>(num_workers, timeout_s);
                 close_before_end(made);
                 return made;
             }),
             py::arg("num_workers"), py::arg("timeout_s") = 0.0,
             "Raises RuntimeError when the system refuses a thread. A step whose action takes "
             "longer than the timeout has stalled; 0: no time is too long.")
        .def("__enter__", &Executor::claim,
             "Takes the executor for one step; raises RuntimeError when it cannot run one.")
        .def("__exit__", [](Executor& self, const py::args&) { self.release(); })
        .def("run", &Executor::run, py::arg("program"), py::arg("callbacks"), py::arg("carry"),
             py::arg("begun") = py::none(), py::arg("stalled") = py::none(),
             "Runs a step: calls callbacks[kind][replica * num_stages + stage](microbatch) as the "
             "program says, and carry() on each worker before its first call; what that returns is "
             "called after the last. Returns what failed, first things first, as (action, device, "
             "exception); empty when everything ran. That of an endless program lasts until it "
             "is stopped; begun() is called once it can be fed. Where an action takes too long, or "
             "goes on behind a second interrupt, the workers are given up, no step runs any more, "
             "and the exception is that of stalled(acting, rows): what does not end, as ((action, "
             "device), seconds, thread), the longest first, and the next action of each row that "
             "waits, with the inputs it lacks.")
        .def("feed", &Executor::feed, py::arg("program"), py::arg("slot"),
             "Lets the next slot of an endless program go through the stages; its last round is "
             "through. Without effect when the program does not run any more.")
        .def("stop", &Executor::stop, py::arg("program"), py::arg("exception") = py::none(),
             "Lets no further action of an endless program start. An exception interrupts those "
             "under way, and is what its run returns. Without effect when it does not run.")
        .def("close", &Executor::close,
             "Stops a step that runs in another thread, waits for its end, and ends the workers. "
             "Happens by itself before the interpreter ends.");
}

}  // namespace

void bind_exec(py::module_& module) {
    module.attr("nvtx_built") = nvtx_built();
    bind_program(module);
    bind_executor(module);
}

}  // namespace pykern
