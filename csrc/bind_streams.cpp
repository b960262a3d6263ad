// Python's side of the streams driver: programs on lanes, and the executor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "calls.hpp"
#include "ending.hpp"
#include "exec/stream_watch.hpp"
#include "exec/streams.hpp"
#include "interpreter_lock.hpp"
#include "issuing_callbacks.hpp"
#include "patience.hpp"
#include "plan/text.hpp"
#include "stream_program.hpp"
#include "transfers.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

// A handle of the driver, as its users pass it around.
template <class Handle>
Handle handle_from(Address address) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<Handle>(address);
}

std::map<int, cuda::CUstream> streams_from(const std::map<int, Address>& handles) {
    std::map<int, cuda::CUstream> streams;
    for (const auto& [gpu, stream] : handles) {
        streams[gpu] = handle_from<cuda::CUstream>(stream);
    }
    return streams;
}

// Runs the actions of one step as Python calls on the calling thread.
class StreamCallbacks final : public StreamClient {
   public:
    StreamCallbacks(const StreamOrder& order, const CallsOfKinds& calls)
        : order_(order), calls_(calls) {}

    // Throws, and so ends the process, only where there is no memory to tell of a failure.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    bool run(TaskNumber number, Transfers& transfers) noexcept override {
        const Task& task = order_.tasks()[number];
        const Locked lock;
        try {
            const Placement& placement = order_.plan().placement();
            const int replica = placement.replica_of(task.action.microbatch);
            const int stage = replica * placement.num_stages() + task.action.stage;
            const py::object result = calls_.at(task.action.kind)[static_cast<std::size_t>(stage)](
                task.action.microbatch);
            transfers = transfers_returned(result);
            return true;
        } catch (py::error_already_set& error) {
            error.restore();
            failures_.emplace_back(task.action, task.stream, fetch_exception());
        } catch (const std::exception& error) {
            failures_.emplace_back(
                task.action, task.stream,
                py::module_::import("builtins").attr("RuntimeError")(error.what()));
        }
        return false;
    }

    std::vector<Failure> take_failures() { return std::move(failures_); }

   private:
    const StreamOrder& order_;
    const CallsOfKinds& calls_;
    std::vector<Failure> failures_;
};

class StreamExecutor final : public Closable {
   public:
    StreamExecutor(double timeout_s, py::object stalled) : stalled_(std::move(stalled)) {
        if (timeout_s > 0) watch_ = watching<StreamWatch>(nanoseconds_of(timeout_s), STDERR_FILENO);
    }

    StreamExecutor(const StreamExecutor&) = delete;
    StreamExecutor& operator=(const StreamExecutor&) = delete;

    // To give the lock back throws only where pybind11 was never set up.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    ~StreamExecutor() override { end_watch(); }

    static std::unique_ptr<HeldClaim> claim(const std::shared_ptr<StreamExecutor>& self) {
        self->refuse_stalled();
        return std::make_unique<HeldClaim>(std::shared_ptr<Claim>(self, &self->claim_));
    }

    void refuse_stalled() {
        // The lock of the watch may be held by a thread that stayed in the parent.
        if (claim_.is_fork()) return;
        const std::string told = report();
        if (!told.empty()) throw_stalled(told);
    }

    void settle(const py::object& done) {
        const std::shared_ptr<StreamWatch> watch = watch_;
        if (!watch || claim_.is_fork()) {
            refuse_stalled();
            return;
        }
        bool goes_on = false;
        {
            const Unlocked unlocked;
            goes_on = watch->settle([&done] {
                const Locked lock;
                if (PyErr_CheckSignals() != 0) throw py::error_already_set();
                return !done.is_none() && py::cast<bool>(done());
            });
        }
        if (!goes_on) throw_stalled(watch->report());
    }

    std::vector<Failure> run(StreamProgram& program, const CallsOfKinds& calls,
                             const std::map<int, Address>& callers, bool replay, bool traced) {
        if (!claim_.is_mine()) throw std::logic_error("run needs a claim");
        const StreamOrder& order = program.job.order();
        const Plan& plan = order.plan();
        if (!replay) require_calls(plan.placement(), plan.num_slices(), program.held(), calls);
        const std::map<int, cuda::CUstream> streams = streams_from(callers);
        // A trace begins with empty streams.
        if (traced) settle(py::none());
        StreamCallbacks callbacks(order, calls);
        try {
            const Unlocked unlocked;
            StreamTrace* trace = traced ? begin_trace(program) : nullptr;
            Dispatch dispatch(program.job, streams, callbacks, replay, trace, watch_.get());
            program.is_traced = dispatch.run() && (traced || program.is_traced);
        } catch (const StreamsStalled&) {
            throw_stalled(report());
        }
        return callbacks.take_failures();
    }

    std::vector<Failure> run_by(Issuers& issuers, StreamProgram& program, const CallsOfKinds& calls,
                                const py::object& carry, const std::map<int, Address>& callers,
                                bool traced) {
        if (!claim_.is_mine()) throw std::logic_error("run_by needs a claim");
        const std::map<int, cuda::CUstream> streams = streams_from(callers);
        if (traced) settle(py::none());
        if (!program.by_threads) program.by_threads = std::make_unique<IssuingProgram>(program.job);
        const std::unique_ptr<HeldClaim> held = issuers.claim();
        std::vector<Failure> failures;
        try {
            const Unlocked unlocked;
            StreamTrace* trace = traced ? begin_trace(program) : nullptr;
            Dispatch dispatch(program.job, streams, issuers.client(), false, trace, watch_.get());
            const bool ran = dispatch.run([&] {
                const Locked lock;
                failures = issuers.issue(dispatch, *program.by_threads, calls, carry);
                return failures.empty();
            });
            program.is_traced = ran && (traced || program.is_traced);
        } catch (const StreamsStalled&) {
            throw_stalled(report());
        }
        return failures;
    }

    void run_whole(StreamProgram& program, const std::map<int, Address>& callers) {
        if (!claim_.is_mine()) throw std::logic_error("run_whole needs a claim");
        const std::map<int, cuda::CUstream> streams = streams_from(callers);
        try {
            const Unlocked unlocked;
            if (!program.whole || !program.whole->is_current()) {
                program.whole.reset();
                program.whole = std::make_unique<StepGraph>(program.job, watch_ != nullptr);
            }
            program.whole->run(streams, watch_.get());
        } catch (const StreamsStalled&) {
            throw_stalled(report());
        }
    }

    bool close() {
        if (claim_.is_fork()) return true;
        if (claim_.is_mine()) {
            throw std::runtime_error(
                "a stage or a signal handler cannot close the pipeline that runs it");
        }
        claim_.close();
        const py::object raised = claim_.wait([](const py::object&) {});
        if (raised) raise_exception(raised);
        try {
            settle(py::none());
        } catch (const py::error_already_set&) {
            if (report().empty()) throw;
        }
        end_watch();
        return report_.empty();
    }

    void close_at_end() noexcept override {
        close_silently([this] { close(); });
    }

    std::vector<pid_t> callers() override { return claim_.callers(); }

   private:
    static StreamTrace* begin_trace(StreamProgram& program) {
        if (!program.trace) program.trace = std::make_unique<StreamTrace>(program.job);
        program.is_traced = false;
        program.trace->begin();
        return program.trace.get();
    }

    std::string report() const { return watch_ ? watch_->report() : report_; }

    [[noreturn]] void throw_stalled(const std::string& told) { raise_exception(stalled_(told)); }

    // Its thread ends once nobody settles any more, and its report stays.
    void end_watch() {
        if (!watch_) return;
        if (claim_.is_fork()) {
            // The thread stayed in the parent, and its lock may be held.
            static_cast<void>(new std::shared_ptr<StreamWatch>(std::move(watch_)));
            return;
        }
        report_ = watch_->report();
        std::shared_ptr<StreamWatch> ended = std::move(watch_);
        const Unlocked unlocked;
        ended.reset();
    }

    Claim claim_;
    py::object stalled_;  // makes the exception of a report
    // With a timeout, until the executor is closed. A thread that settles has its own, since
    // another one may close the executor meanwhile.
    std::shared_ptr<StreamWatch> watch_;
    std::string report_;  // of the watch that has ended
};

using PyProgram = py::class_<StreamProgram>;

void bind_slots(PyProgram& program) {
    program.def(
        "slots",
        [](const StreamProgram& self, int stage) {
            const Plan& plan = self.job.order().plan();
            in_range("stage", stage, plan.num_stages());
            std::vector<int> slots;
            for (int number = 0; number < plan.num_microbatches(); ++number) {
                const Action forward{.microbatch = static_cast<std::uint32_t>(number),
                                     .stage = static_cast<std::uint16_t>(stage)};
                slots.push_back(self.job.order().slot_of(forward));
            }
            return slots;
        },
        "stage"_a, "By microbatch, the slot of its cell at the stage.");
}

void bind_streams_program(py::module_& module) {
    PyProgram program(module, "StreamProgram", "A checked plan, ready to run on lanes.");
    bind_slots(program);
    program.def(py::init<const Plan&, std::shared_ptr<const Lanes>>(), "plan"_a, "lanes"_a)
        .def_static(
            "half",
            [](const Plan& plan, std::shared_ptr<const Lanes> lanes, bool forwards) {
                const Half half = forwards ? Half::kForwards : Half::kRest;
                return std::make_unique<StreamProgram>(plan, std::move(lanes), half);
            },
            "plan"_a, "lanes"_a, "forwards"_a,
            "The forwards of a plan that has them first, or what comes after them. Raises "
            "ValueError if a device has a forward behind another action.")
        .def_property_readonly(
            "is_half", [](const StreamProgram& self) { return self.job.half() != Half::kWhole; },
            "Whether it issues a part of its plan only.")
        .def_property_readonly("plan",
                               [](const StreamProgram& self) { return self.job.order().plan(); })
        .def(
            "has",
            [](const StreamProgram& self, Kind kind) {
                return self.held()[static_cast<std::size_t>(kind)];
            },
            "kind"_a, "Whether the plan has any action of this kind.")
        .def(
            "set_launch",
            [](StreamProgram& self, Action action, Address exec, Address graph,
               const std::vector<PythonTransfer>& before,
               const std::vector<PythonTransfer>& after) {
                self.job.set_launch(self.task_of(action),
                                    {.exec = handle_from<cuda::CUgraphExec>(exec),
                                     .graph = handle_from<cuda::CUgraph>(graph),
                                     .before = transfers_from(before),
                                     .after = transfers_from(after)});
            },
            "action"_a, "exec"_a, "graph"_a, "before"_a, "after"_a,
            "Sets what replays an action: a captured graph as instantiated and as captured, both 0 "
            "where there is nothing to compute, and what moves before and after.")
        .def(
            "set_transfers",
            [](StreamProgram& self, Action copy, const std::vector<PythonTransfer>& transfers) {
                self.job.set_transfers(self.task_of(copy), transfers_from(transfers));
            },
            "copy"_a, "transfers"_a,
            "Sets what the copy of a launched action moves: (to, from, bytes, via) for each "
            "tensor.")
        .def(
            "timeline", [](const StreamProgram& self) { return self.last_trace().actions(); },
            "The times of the last traced step, on the GPUs' clocks; a row for each device.")
        .def(
            "copies", [](const StreamProgram& self) { return self.last_trace().copies(); },
            "The same for its copies; a row for each copy stream.");
}

}  // namespace

void bind_streams(py::module_& module) {
    bind_streams_program(module);
    py::class_<Issuers>(module, "Issuers", "Threads that issue steps, one for each lane.")
        .def(py::init([](int num_lanes) {
                 stay_at_end();
                 return std::make_unique<Issuers>(num_lanes);
             }),
             "num_lanes"_a, "Raises RuntimeError when the system refuses a thread.")
        .def("close", &Issuers::close,
             "Stops a step that runs in another thread, and ends the threads.");
    py::class_<StreamExecutor, std::shared_ptr<StreamExecutor>>(
        module, "StreamExecutor", "Issues programs to the streams of lanes.")
        .def(py::init([](double timeout_s, py::object stalled) {
                 stay_at_end();
                 auto made = std::make_shared<StreamExecutor>(timeout_s, std::move(stalled));
                 close_before_end(made);
                 return made;
             }),
             "timeout_s"_a = 0.0, "stalled"_a = py::none(),
             "A task of a step that takes longer than the timeout has stalled: a report is written "
             "to stderr, and stalled(report) is what calls raise from then on. 0: no time is too "
             "long.")
        .def("claim", &StreamExecutor::claim,
             "Takes the executor for one step, until the end of the context that it gives. Raises "
             "RuntimeError when the executor cannot run a step, and what `stalled` makes when one "
             "has stalled.")
        .def("run", &StreamExecutor::run, "program"_a, "callbacks"_a, "callers"_a, "replay"_a,
             "traced"_a,
             "Issues a step on the calling thread, which began on the callers' streams, one for "
             "each GPU. Replays launches, or else calls "
             "callbacks[kind][replica * num_stages + stage](microbatch), which returns what the "
             "copy of its result moves, as (to, from, bytes, via). Returns what failed, as "
             "(action, device, exception). Raises CudaError.")
        .def("run_by", &StreamExecutor::run_by, "issuers"_a, "program"_a, "callbacks"_a, "carry"_a,
             "callers"_a, "traced"_a,
             "Has threads issue a step, one for each lane: the same as run without a replay. Each "
             "thread calls carry() before its first call, and what carry() returned after its last "
             "call.")
        .def("run_whole", &StreamExecutor::run_whole, "program"_a, "callers"_a,
             "Launches a step as one graph, made of the graphs of all actions; it is made at the "
             "first call, and again when a launch or transfers have changed. Raises ValueError "
             "where an action has no launch, and CudaError.")
        .def("refuse_stalled", &StreamExecutor::refuse_stalled, "Raises where a step has stalled.")
        .def("settle", &StreamExecutor::settle, "done"_a = py::none(),
             "With a timeout, waits until done() is true or all steps are over; raises where one "
             "stalls. Without one, returns at once.")
        .def("close", &StreamExecutor::close,
             "No step begins any more; waits for the last one. Returns whether steps are over, as "
             "far as anybody has watched them.");
}

}  // namespace pykern
