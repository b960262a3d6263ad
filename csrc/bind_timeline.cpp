#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "bind.hpp"
#include "plan/check.hpp"
#include "plan/costs.hpp"
#include "plan/memory.hpp"
#include "plan/simulate.hpp"
#include "plan/text.hpp"
#include "plan/timeline.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

void bind_costs(py::module_& module) {
    py::class_<Costs>(module, "Costs", "How long each action takes, in nanoseconds.")
        .def(py::init<StageValues, StageValues, double, std::optional<StageValues>,
                      std::optional<StageValues>>(),
             "forward_ns"_a, "backward_ns"_a, "transfer_ns"_a = 0.0, py::kw_only(),
             "input_ns"_a = py::none(), "weight_ns"_a = py::none())
        .def_property_readonly("forward_ns", &Costs::forward_ns)
        .def_property_readonly("backward_ns", &Costs::backward_ns)
        .def_property_readonly("input_ns", &Costs::input_ns)
        .def_property_readonly("weight_ns", &Costs::weight_ns)
        .def_property_readonly("transfer_ns", &Costs::transfer_ns)
        .def(py::self == py::self)
        .def("__repr__", [](const Costs& self) {
            return py::str(
                       "Costs(forward_ns={}, backward_ns={}, transfer_ns={}, input_ns={}, "
                       "weight_ns={})")
                .format(self.forward_ns(), self.backward_ns(), self.transfer_ns(), self.input_ns(),
                        self.weight_ns());
        });

    // kept_bytes is activation_bytes where it is not given: everything is freed after W.
    py::class_<Memory>(module, "Memory",
                       "What one microbatch holds on one stage, a number for every stage or a "
                       "list.")
        .def(py::init([](const StageValues& activation, const std::optional<StageValues>& kept,
                         const StageValues& boundary) {
                 return Memory(activation, kept.value_or(activation), boundary);
             }),
             "activation_bytes"_a, "kept_bytes"_a = py::none(), "boundary_bytes"_a = 0.0)
        .def_property_readonly("activation_bytes", &Memory::activation_bytes)
        .def_property_readonly("kept_bytes", &Memory::kept_bytes)
        .def_property_readonly("boundary_bytes", &Memory::boundary_bytes);
}

void bind_spans(py::module_& module) {
    py::class_<Span>(module, "Span", "One action with its start and end.")
        .def(py::init<Action, double, double>(), "action"_a, "start_ns"_a, "end_ns"_a)
        .def_readonly("action", &Span::action)
        .def_readonly("start_ns", &Span::start_ns)
        .def_readonly("end_ns", &Span::end_ns)
        .def(py::self == py::self)
        .def("__repr__", [](const Span& self) {
            return py::str("Span({}, start_ns={}, end_ns={})")
                .format(to_text(self.action), self.start_ns, self.end_ns);
        });

    py::class_<Timeline>(module, "Timeline", "What ran when: predicted or measured.")
        .def(py::init<std::vector<std::vector<Span>>>(), "rows"_a)
        .def_property_readonly("rows",
                               [](const Timeline& self) { return tuple_of_tuples(self.rows()); })
        .def_property_readonly("num_devices", &Timeline::num_devices)
        .def_property_readonly("makespan_ns", &Timeline::makespan_ns,
                               "From the first start to the last end over all devices.")
        .def_property_readonly("bubble_ratio", &Timeline::bubble_ratio,
                               "Idle device time divided by makespan, 0 to 1.")
        .def(
            "busy_ns",
            [](const Timeline& self, int device) {
                return self.busy_ns(in_range("device", device, self.num_devices()));
            },
            "device"_a, "Time in which the device computes.")
        .def(
            "peak_in_flight",
            [](const Timeline& self, int device) {
                return self.peak_in_flight(in_range("device", device, self.num_devices()));
            },
            "device"_a, "Most microbatches that the device holds at once, counted in chunks.")
        .def("__repr__", [](const Timeline& self) {
            return py::str("<Timeline num_devices={} makespan_ns={:.6g} bubble_ratio={:.4f}>")
                .format(self.num_devices(), self.makespan_ns(), self.bubble_ratio());
        });
}

}  // namespace

void bind_timeline(py::module_& module) {
    bind_costs(module);
    bind_spans(module);
    module.def("simulate", &simulate, "plan"_a, "costs"_a,
               "The timeline that a plan would take with these costs.");
    module.def("check_memory", &check_memory, "plan"_a, "memory"_a, "cap_bytes"_a,
               "Raises PlanError where a device would hold more than the cap at once.");
    module.def(
        "peak_bytes",
        [](const Plan& plan, const Memory& memory) {
            check(plan);
            return peak_bytes(plan, memory);
        },
        "plan"_a, "memory"_a, "Most bytes that each device holds at once.");
}

}  // namespace pykern
