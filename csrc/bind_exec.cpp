// Python's side of the executor: the interpreter lock, callables, exceptions and contexts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "calls.hpp"
#include "exec/ranges.hpp"
#include "exec/workers.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// Runs the actions of a step as Python calls. Every member is guarded by the interpreter lock.
class Callbacks final : public Client {
   public:
    explicit Callbacks(int num_workers) : workers_(static_cast<std::size_t>(num_workers)) {}

    void begin(const Program& program, CallsOfKinds calls, py::object carry) {
        program_ = &program;
        for (auto& [kind, of_kind] : calls) {
            calls_[static_cast<std::size_t>(kind)] = std::move(of_kind);
        }
        carry_ = std::move(carry);
        context_ = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
        if (!context_) throw py::error_already_set();
    }

    // Forgets the step, so that nothing of the user's outlives it; returns what went wrong.
    std::vector<Failure> end() {
        program_ = nullptr;
        for (auto& calls : calls_) calls.clear();
        carry_ = py::object();
        context_ = py::object();
        interrupted_ = false;
        return std::exchange(failures_, {});
    }

    // Lets Python handle its signals on the calling thread. An exception from there ends the step,
    // and is raised in the actions under way too, so that a long one does not hold up the user's
    // Ctrl-C.
    bool check_signals() {
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() == 0) return interrupted_;
        interrupt(fetch_exception());
        return true;
    }

    // The same for an exception that has come to another thread than the one that runs the step.
    void interrupt(py::object exception) {
        failures_.emplace_back(std::nullopt, -1, std::move(exception));
        interrupted_ = true;
        for (const Worker& worker : workers_) {
            if (worker.acting) PyThreadState_SetAsyncExc(worker.thread_id, PyExc_KeyboardInterrupt);
        }
    }

    bool runs(const Program& program) const { return program_ == &program; }

    void attach(int worker) noexcept override {
        // One thread state for the life of the thread: a fresh one per call would cost 60 times as
        // much.
        gil_state_of(worker) = PyGILState_Ensure();
        workers_[static_cast<std::size_t>(worker)].thread_id = PyThread_get_thread_ident();
        suspend(worker);
    }

    void detach(int worker) noexcept override {
        resume(worker);
        PyGILState_Release(gil_state_of(worker));
    }

    void resume(int worker) noexcept override {
        PyEval_RestoreThread(workers_[static_cast<std::size_t>(worker)].state);
    }

    void suspend(int worker) noexcept override {
        workers_[static_cast<std::size_t>(worker)].state = PyEval_SaveThread();
    }

    bool enter(int worker) noexcept override {
        Worker& self = workers_[static_cast<std::size_t>(worker)];
        // A context is entered by one thread at a time, so each worker has a copy of the caller's.
        self.context = py::reinterpret_steal<py::object>(PyContext_Copy(context_.ptr()));
        if (!self.context || PyContext_Enter(self.context.ptr()) != 0) {
            self.context = py::object();
            return fail(std::nullopt, worker);
        }
        self.leave = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(carry_.ptr()));
        return self.leave ? true : fail(std::nullopt, worker);
    }

    void leave(int worker) noexcept override {
        Worker& self = workers_[static_cast<std::size_t>(worker)];
        if (self.leave) {
            const auto result =
                py::reinterpret_steal<py::object>(PyObject_CallNoArgs(self.leave.ptr()));
            if (!result) fail(std::nullopt, worker);
        }
        self.leave = py::object();
        if (self.context && PyContext_Exit(self.context.ptr()) != 0) fail(std::nullopt, worker);
        self.context = py::object();
    }

    bool run(int worker, Position position) noexcept override {
        // While this worker waited for the lock another action failed, or an interrupt came, which
        // reaches only those under way.
        if (!failures_.empty()) return false;
        Worker& self = workers_[static_cast<std::size_t>(worker)];
        const Action action = program_->action(position);
        const py::object& call =
            calls_[static_cast<std::size_t>(action.kind)][program_->stage_of_replica(position)];
        const auto microbatch =
            py::reinterpret_steal<py::object>(PyLong_FromUnsignedLong(action.microbatch));
        self.acting = true;
        const auto result =
            py::reinterpret_steal<py::object>(PyObject_CallOneArg(call.ptr(), microbatch.ptr()));
        self.acting = false;
        // An interrupt meant for the action that just ended must not hit what this thread does
        // next.
        if (interrupted_) PyThreadState_SetAsyncExc(self.thread_id, nullptr);
        return result ? true : fail(action, program_->device_of(position));
    }

   private:
    struct Worker {
        PyGILState_STATE gil_state{};
        PyThreadState* state = nullptr;
        unsigned long thread_id = 0;
        bool acting = false;
        py::object context;
        py::object leave;
    };

    PyGILState_STATE& gil_state_of(int worker) {
        return workers_[static_cast<std::size_t>(worker)].gil_state;
    }

    bool fail(std::optional<Action> action, int device) {
        py::object exception = fetch_exception();
        // Once interrupted, what actions raise is the interrupt's echo.
        if (!interrupted_) failures_.emplace_back(action, device, std::move(exception));
        return false;
    }

    std::vector<Worker> workers_;
    const Program* program_ = nullptr;
    std::array<std::vector<py::object>, kNumKinds> calls_;
    py::object carry_;
    py::object context_;
    bool interrupted_ = false;
    std::vector<Failure> failures_;
};

// The executor as Python sees it: a set of workers with their callbacks, bound to one process.
class Executor {
   public:
    explicit Executor(int num_workers) : num_workers_(num_workers) {
        if (num_workers < 1) {
            throw std::invalid_argument("an executor needs at least 1 worker, got " +
                                        std::to_string(num_workers));
        }
        callbacks_ = std::make_unique<Callbacks>(num_workers);
        const py::gil_scoped_release no_gil;
        workers_ = std::make_unique<Workers>(num_workers, *callbacks_);
    }

    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Giving the lock back throws only where pybind11 was never set up.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    ~Executor() {
        if (claim_.is_fork()) {
            // The threads stayed in the parent: there is nothing to join, and their locks may be
            // held.
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
                             const py::object& begun) {
        refuse_misfit(job.program, calls);
        callbacks_->begin(job.program, std::move(calls), std::move(carry));
        const bool wanted = !begun.is_none();
        {
            const py::gil_scoped_release no_gil;
            // Steps that nobody wants to be told of do not take the lock from the workers.
            const auto call_begun = [&begun, wanted] {
                if (!wanted) return;
                const py::gil_scoped_acquire gil;
                begun();
            };
            workers_->run(job, [this] { return callbacks_->check_signals(); }, call_begun);
        }
        std::vector<Failure> failures = callbacks_->end();
        if (failures.empty() && workers_->closed()) {
            throw std::runtime_error("the pipeline was closed while it ran a step");
        }
        return failures;
    }

    void feed(const Job& job, int slot) {
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
        if (claim_.is_fork()) return;
        if (workers_->is_worker() || claim_.is_mine()) {
            throw std::runtime_error(
                "a stage or a signal handler cannot close the pipeline that runs it");
        }
        const py::gil_scoped_release no_gil;
        claim_.close();
        workers_->close();
        // At exit the interpreter goes down next, and would end the process if the step's caller
        // came back for its lock from here.
        claim_.wait();
    }

   private:
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
    std::unique_ptr<Callbacks> callbacks_;
    std::unique_ptr<Workers> workers_;  // after callbacks_, which its threads use
};

}  // namespace

void bind_exec(py::module_& module) {
    module.attr("nvtx_built") = nvtx_built();

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

    py::class_<Executor>(module, "Executor", "Worker threads that run programs, one device each.")
        .def(py::init<int>(), py::arg("num_workers"))
        .def("__enter__", &Executor::claim,
             "Takes the executor for one step; raises RuntimeError when it cannot run one.")
        .def("__exit__", [](Executor& self, const py::args&) { self.release(); })
        .def("run", &Executor::run, py::arg("program"), py::arg("callbacks"), py::arg("carry"),
             py::arg("begun") = py::none(),
             "Runs a step: calls callbacks[kind][replica * num_stages + stage](microbatch) as the "
             "program says, and carry() on each worker before its first call; what that returns is "
             "called after the last. Returns what failed, first things first, as (action, device, "
             "exception); empty when everything ran. That of an endless program lasts until it "
             "is stopped; begun() is called once it can be fed.")
        .def("feed", &Executor::feed, py::arg("program"), py::arg("slot"),
             "Lets the next slot of an endless program go through the stages; its last round is "
             "through. Without effect when the program does not run any more.")
        .def("stop", &Executor::stop, py::arg("program"), py::arg("exception") = py::none(),
             "Lets no further action of an endless program start. An exception interrupts those "
             "under way, and is what its run returns. Without effect when it does not run.")
        .def("close", &Executor::close,
             "Stops a step that runs in another thread, then ends the workers and waits for it.");
}

}  // namespace pykern
