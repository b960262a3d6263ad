#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "bind.hpp"
#include "plan/action.hpp"
#include "plan/check.hpp"
#include "plan/costs.hpp"
#include "plan/generate.hpp"
#include "plan/placement.hpp"
#include "plan/plan.hpp"
#include "plan/simulate.hpp"
#include "plan/text.hpp"
#include "plan/timeline.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

// Immutable all the way down, like the values it is made of.
template <class T>
py::tuple tuple_of_tuples(const std::vector<std::vector<T>>& rows) {
    py::tuple result(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) result[i] = py::tuple(py::cast(rows[i]));
    return result;
}

int in_range(const char* name, int value, int count) {
    if (value >= 0 && value < count) return value;
    throw py::index_error(std::string(name) + " must be 0 to " + std::to_string(count - 1) +
                          ", got " + std::to_string(value));
}

void raise_plan_error(const py::object& type, const PlanError& error) {
    const py::object instance = type(error.what());
    instance.attr("rule") = error.rule();
    instance.attr("device") = error.device();
    instance.attr("position") = error.position();
    PyErr_SetObject(type.ptr(), instance.ptr());
}

void bind_error(py::module_& module) {
    const char* doc =
        "A plan that cannot run. `rule` is the id of the rule it breaks (docs/plan-rules.md);\n"
        "`device` and `position` say where.";
    PyObject* made =
        PyErr_NewExceptionWithDoc("pykern._C.PlanError", doc, PyExc_ValueError, nullptr);
    if (made == nullptr) throw py::error_already_set();
    // Lives as long as the process: a plan may be refused while the interpreter shuts down.
    static PyObject* type = made;
    module.attr("PlanError") = py::reinterpret_borrow<py::object>(type);
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const PlanError& error) {
            raise_plan_error(py::reinterpret_borrow<py::object>(type), error);
        }
    });
}

void bind_action(py::module_& module) {
    py::native_enum<Kind>(module, "Kind", "enum.Enum", "What an action does.")
        .value("F", Kind::F)
        .value("R", Kind::R)
        .value("B", Kind::B)
        .value("I", Kind::I)
        .value("W", Kind::W)
        .value("U", Kind::U)
        .value("COPY_F", Kind::COPY_F)
        .value("COPY_B", Kind::COPY_B)
        .value("REDUCE", Kind::REDUCE)
        .finalize();

    py::class_<Action>(module, "Action", "One kind of work on one stage for one microbatch.")
        .def(py::init(&make_action), "kind"_a, "stage"_a, "microbatch"_a)
        .def_static("parse", &parse_action, "text"_a, "The action written as torch's \"2F0\".")
        .def_readonly("kind", &Action::kind)
        .def_readonly("stage", &Action::stage)
        .def_readonly("microbatch", &Action::microbatch)
        .def(py::self == py::self)
        .def("__hash__",
             [](const Action& self) {
                 return py::hash(
                     py::make_tuple(static_cast<int>(self.kind), self.stage, self.microbatch));
             })
        .def("__str__", &to_text)
        .def("__repr__", [](const Action& self) { return "Action(" + to_text(self) + ")"; })
        .def(py::pickle([](const Action& self) { return to_text(self); },
                        [](const std::string& text) { return parse_action(text); }));
}

void bind_placement(py::module_& module) {
    py::class_<Placement>(module, "Placement", "Which device computes which stage.")
        .def(py::init<int, std::vector<int>>(), "num_devices"_a, "device_of_stage"_a)
        .def_static("linear", &Placement::linear, "num_devices"_a, "Stage s on device s.")
        .def_static("looped", &Placement::looped, "num_devices"_a, "num_chunks"_a,
                    "Stage s on device s mod num_devices.")
        .def_static("wave", &Placement::wave, "num_devices"_a, "waves"_a,
                    "Stages run down the devices and back up, `waves` times.")
        .def_property_readonly("num_devices", &Placement::num_devices)
        .def_property_readonly("num_stages", &Placement::num_stages)
        .def_property_readonly(
            "device_of_stage",
            [](const Placement& self) { return py::tuple(py::cast(self.device_of_stage())); })
        .def(
            "device_of",
            [](const Placement& self, int stage) {
                return self.device_of(in_range("stage", stage, self.num_stages()));
            },
            "stage"_a, "The device that computes a stage.")
        .def(py::self == py::self)
        .def("__hash__",
             [](const Placement& self) {
                 return py::hash(py::make_tuple(self.num_devices(),
                                                py::tuple(py::cast(self.device_of_stage()))));
             })
        .def("__repr__",
             [](const Placement& self) {
                 return py::str("Placement(num_devices={}, device_of_stage={})")
                     .format(self.num_devices(), self.device_of_stage());
             })
        .def(py::pickle(
            [](const Placement& self) {
                return py::make_tuple(self.num_devices(), self.device_of_stage());
            },
            [](const py::tuple& state) {
                return Placement(state[0].cast<int>(), state[1].cast<std::vector<int>>());
            }));
}

void bind_plan_class(py::module_& module) {
    py::class_<Plan>(module, "Plan", "One row of actions per device, in the order they run.")
        .def(py::init<Placement, int, std::vector<Row>>(), "placement"_a, "num_microbatches"_a,
             "rows"_a)
        .def_property_readonly("placement", [](const Plan& self) { return self.placement(); })
        .def_property_readonly("num_devices", &Plan::num_devices)
        .def_property_readonly("num_stages", &Plan::num_stages)
        .def_property_readonly("num_microbatches", &Plan::num_microbatches)
        .def_property_readonly("num_actions", &Plan::num_actions)
        .def_property_readonly("rows",
                               [](const Plan& self) { return tuple_of_tuples(self.rows()); })
        .def("forward_only", &Plan::forward_only, "The same plan with its forward actions only.")
        .def(py::self == py::self)
        .def("__str__", &table)
        .def("__repr__",
             [](const Plan& self) {
                 return py::str(
                            "<Plan num_devices={} num_stages={} num_microbatches={} "
                            "num_actions={}>")
                     .format(self.num_devices(), self.num_stages(), self.num_microbatches(),
                             self.num_actions());
             })
        .def(py::pickle(
            [](const Plan& self) {
                return py::make_tuple(self.placement(), self.num_microbatches(), self.rows());
            },
            [](const py::tuple& state) {
                return Plan(state[0].cast<Placement>(), state[1].cast<int>(),
                            state[2].cast<std::vector<Row>>());
            }));
}

void bind_timeline(py::module_& module) {
    py::class_<Costs>(module, "Costs", "How long each action takes, in nanoseconds.")
        .def(py::init<StageTimes, StageTimes, double>(), "forward_ns"_a, "backward_ns"_a,
             "transfer_ns"_a = 0.0)
        .def_property_readonly("forward_ns", &Costs::forward_ns)
        .def_property_readonly("backward_ns", &Costs::backward_ns)
        .def_property_readonly("transfer_ns", &Costs::transfer_ns)
        .def(py::self == py::self)
        .def("__repr__", [](const Costs& self) {
            return py::str("Costs(forward_ns={}, backward_ns={}, transfer_ns={})")
                .format(self.forward_ns(), self.backward_ns(), self.transfer_ns());
        });

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

void bind_functions(py::module_& module) {
    module.attr("MAX_CELLS") = kMaxCells;
    module.def("by_slots", &by_slots, "placement"_a, "num_microbatches"_a, "group"_a,
               "group_offset"_a, "A plan from the lattice rule: 1F1B and every wave.");
    module.def("by_phases", &by_phases, "placement"_a, "num_microbatches"_a, "warmup"_a, "group"_a,
               "A plan of warm-up, steady and cool-down: GPipe and interleaved.");
    module.def("check", &check, "plan"_a, "Proves that a plan can run, or raises PlanError.");
    module.def("simulate", &simulate, "plan"_a, "costs"_a,
               "The timeline that a plan would take with these costs.");
}

}  // namespace

void bind_plan(py::module_& module) {
    bind_error(module);
    bind_action(module);
    bind_placement(module);
    bind_plan_class(module);
    bind_timeline(module);
    bind_functions(module);
}

}  // namespace pykern
