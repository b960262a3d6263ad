#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "named.hpp"
#include "plan/check_lowered.hpp"
#include "plan/lower.hpp"
#include "plan/text.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

void bind_copy(py::module_& module) {
    py::class_<Copy>(module, "Copy", "One transfer, and the slot of the receiver's ring it fills.")
        .def(py::init<Action, int, std::optional<Action>>(), "action"_a, "slot"_a,
             "freed_by"_a = py::none())
        .def_readonly("action", &Copy::action)
        .def_readonly("slot", &Copy::slot)
        .def_readonly("freed_by", &Copy::freed_by,
                      "The receiver's action that must have ended before; None for a slot's first "
                      "use, and for COPY_B, which lands where its microbatch is.")
        .def(py::self == py::self)
        .def("__repr__", [](const Copy& self) {
            return py::str("Copy({}, slot={}, freed_by={})")
                .format(to_text(self.action), self.slot, py::cast(self.freed_by));
        });
}

void bind_lane(py::module_& module) {
    py::class_<Lane>(module, "Lane", "The copies from one device to another, one after the other.")
        .def(py::init([](int sender, int receiver, std::vector<Copy> copies) {
                 return Lane{{sender, receiver}, std::move(copies)};
             }),
             "sender"_a, "receiver"_a, "copies"_a)
        .def_property_readonly("sender", [](const Lane& self) { return self.link.from; })
        .def_property_readonly("receiver", [](const Lane& self) { return self.link.to; })
        .def_property_readonly("copies",
                               [](const Lane& self) { return py::tuple(py::cast(self.copies)); })
        .def(py::self == py::self);
}

void bind_ring(py::module_& module) {
    py::class_<Ring>(module, "Ring",
                     "The slots of a stage. Each holds a microbatch from its input to its B or W.")
        .def(py::init<int, int, int, int>(), "stage"_a, "replica"_a, "device"_a, "num_slots"_a)
        .def_readonly("stage", &Ring::stage)
        .def_readonly("replica", &Ring::replica)
        .def_readonly("device", &Ring::device, "The device of the stage in that replica.")
        .def_readonly("num_slots", &Ring::num_slots)
        .def(py::self == py::self);
}

}  // namespace

void bind_lower(py::module_& module) {
    bind_copy(module);
    bind_lane(module);
    bind_ring(module);
    py::class_<LoweredPlan>(module, "LoweredPlan", "A plan with the copies between its devices.")
        .def(py::init([](Plan plan, std::vector<Lane> lanes) {
                 return LoweredPlan{std::move(plan), std::move(lanes)};
             }),
             "plan"_a, "lanes"_a)
        .def_property_readonly("plan", [](const LoweredPlan& self) { return self.plan; })
        .def_property_readonly(
            "lanes", [](const LoweredPlan& self) { return py::tuple(py::cast(self.lanes)); })
        .def(
            "rings",
            [](const LoweredPlan& self) {
                check(self);
                return rings_of(self);
            },
            "How many slots each stage has, replica after replica.")
        .def(py::self == py::self);
    module.def("lower", named<"plan">(&lower), "plan"_a,
               "The plan with the copies between its devices.");
    module.def("check_lowered", named<"lowered">(py::overload_cast<const LoweredPlan&>(&check)),
               "lowered"_a, "Proves that a plan can run with these copies, or raises PlanError.");
}

}  // namespace pykern
