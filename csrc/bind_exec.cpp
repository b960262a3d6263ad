// Python's side of the worker executor and its programs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bind.hpp"
#include "ending.hpp"
#include "exec/torch_range.hpp"
#include "worker_executor.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

void bind_workers_program(py::module_& module) {
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
        .def("is_short", &WorkerExecutor::is_short, py::arg("program"),
             "Whether the next step of a program is for run_short(): one device has all its "
             "actions, they are expected to take less than 20 ms, and no timeout needs a thread.")
        .def("run_short", &WorkerExecutor::run_short, py::arg("program"), py::arg("callbacks"),
             "The same as run() on the calling thread, whose state the actions have anyway. An "
             "interrupt is the failure of the action that it comes to.")
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
    bind_workers_program(module);
    bind_executor(module);
    bind_torch_ranges(module);
}

}  // namespace pykern
