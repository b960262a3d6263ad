#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "named.hpp"
#include "plan/action.hpp"
#include "plan/by_block.hpp"
#include "plan/by_list.hpp"
#include "plan/by_program.hpp"
#include "plan/check.hpp"
#include "plan/frozen.hpp"
#include "plan/generate.hpp"
#include "plan/placement.hpp"
#include "plan/plan.hpp"
#include "plan/reduce.hpp"
#include "plan/replicate.hpp"
#include "plan/text.hpp"
#include "plan/updates.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

int device_of(const Plan& plan, Action action) {
    in_range("stage", action.stage, plan.num_stages());
    return plan.device_of(action);
}

void describe(py::object& instance, const PlanError& error) {
    instance.attr("rule") = error.rule();
    instance.attr("device") = error.device();
    instance.attr("position") = error.position();
}

void bind_plan_error(py::module_& module) {
    const char* doc =
        "A plan that cannot run. `rule` is the id of the rule it breaks (docs/plan-rules.md);\n"
        "`device` and `position` say where.";
    add_error<PlanError, describe>(module, "PlanError", doc, PyExc_ValueError);
}

void bind_action(py::module_& module) {
    py::native_enum<Kind>(module, "Kind", "enum.Enum", "The work that an action does.")
        .value("F", Kind::F)
        .value("R", Kind::R)
        .value("B", Kind::B)
        .value("I", Kind::I)
        .value("W", Kind::W)
        .value("U", Kind::U)
        .value("COPY_F", Kind::COPY_F)
        .value("COPY_B", Kind::COPY_B)
        .value("REDUCE", Kind::REDUCE)
        .value("OFFLOAD", Kind::OFFLOAD)
        .value("LOAD", Kind::LOAD)
        .finalize();

    py::class_<Action>(module, "Action", "One kind of work on one stage for one microbatch.")
        .def(py::init(named<"kind", "stage", "microbatch", "slice">(&make_action)), "kind"_a,
             "stage"_a, "microbatch"_a, "slice"_a = 0)
        .def_static("parse",
                    named<"text">(+[](const std::string& text) { return parse_action(text); }),
                    "text"_a, "The action written as torch's \"2F0\".")
        .def_readonly("kind", &Action::kind)
        .def_readonly("stage", &Action::stage)
        .def_readonly("microbatch", &Action::microbatch)
        .def_readonly("slice", &Action::slice)
        .def(py::self == py::self)
        .def("__hash__",
             [](const Action& self) {
                 return py::hash(py::make_tuple(static_cast<int>(self.kind), self.stage,
                                                self.microbatch, self.slice));
             })
        .def("__str__", &to_text)
        .def("__repr__", [](const Action& self) { return "Action(" + to_text(self) + ")"; })
        .def(py::pickle([](const Action& self) { return to_text(self); },
                        [](const std::string& text) { return parse_action(text); }));
}

void bind_placement(py::module_& module) {
    py::class_<Placement>(module, "Placement", "Which device computes which stage.")
        .def(py::init(named<"num_devices", "device_of_stage">(&made<Placement, int, Replica>)),
             "num_devices"_a, "device_of_stage"_a)
        .def_static("linear", named<"num_devices">(&Placement::linear), "num_devices"_a,
                    "Stage s on device s.")
        .def_static("looped", named<"num_devices", "num_chunks">(&Placement::looped),
                    "num_devices"_a, "num_chunks"_a, "Stage s on device s mod num_devices.")
        .def_static("wave", named<"num_devices", "waves">(&Placement::wave), "num_devices"_a,
                    "waves"_a, "Stages run down the devices and back up, `waves` times.")
        .def_static("bidirectional", named<"num_devices">(&Placement::bidirectional),
                    "num_devices"_a,
                    "Two replicas: stage s on device s, and on device num_devices - 1 - s.")
        .def_static("replicated",
                    named<"num_devices", "replicas">(&made<Placement, int, std::vector<Replica>>),
                    "num_devices"_a, "replicas"_a, "The devices of each replica, by stage.")
        .def_property_readonly("num_devices", &Placement::num_devices)
        .def_property_readonly("num_stages", &Placement::num_stages)
        .def_property_readonly("num_replicas", &Placement::num_replicas)
        .def_property_readonly(
            "replicas", [](const Placement& self) { return tuple_of_tuples(self.replicas()); },
            "The device of every stage, for each replica.")
        .def("device_of",
             named<"self", "stage", "replica">(+[](const Placement& self, int stage, int replica) {
                 return self.device_of(in_range("stage", stage, self.num_stages()),
                                       in_range("replica", replica, self.num_replicas()));
             }),
             "stage"_a, "replica"_a = 0, "The device that computes a stage of a replica.")
        .def(py::self == py::self)
        .def("__hash__",
             [](const Placement& self) {
                 return py::hash(
                     py::make_tuple(self.num_devices(), tuple_of_tuples(self.replicas())));
             })
        .def("__repr__",
             [](const Placement& self) {
                 if (self.num_replicas() > 1) {
                     return py::str("Placement.replicated(num_devices={}, replicas={})")
                         .format(self.num_devices(), self.replicas());
                 }
                 return py::str("Placement(num_devices={}, device_of_stage={})")
                     .format(self.num_devices(), self.replicas()[0]);
             })
        .def(py::pickle(
            [](const Placement& self) {
                return py::make_tuple(self.num_devices(), self.replicas());
            },
            [](const py::tuple& state) {
                return Placement(state[0].cast<int>(), state[1].cast<std::vector<Replica>>());
            }));
}

void bind_plan_class(py::module_& module) {
    py::class_<Plan>(module, "Plan", "One row of actions per device, in the order they run.")
        .def(py::init(named<"placement", "num_microbatches", "rows", "num_slices", "overlaps">(
                 &made<Plan, Placement, int, std::vector<Row>, int, std::vector<Overlaps>>)),
             "placement"_a, "num_microbatches"_a, "rows"_a, "num_slices"_a = 1,
             "overlaps"_a = std::vector<Overlaps>{})
        .def_property_readonly("placement", [](const Plan& self) { return self.placement(); })
        .def_property_readonly("num_devices", &Plan::num_devices)
        .def_property_readonly("num_stages", &Plan::num_stages)
        .def_property_readonly("num_microbatches", &Plan::num_microbatches)
        .def_property_readonly("num_slices", &Plan::num_slices)
        .def_property_readonly("num_actions", &Plan::num_actions)
        .def_property_readonly("rows",
                               [](const Plan& self) { return tuple_of_tuples(self.rows()); })
        .def_property_readonly(
            "overlaps", [](const Plan& self) { return tuple_of_tuples(self.overlaps()); },
            "Positions of each row whose action shares its slot with the next one.")
        .def("device_of", named<"self", "action">(&device_of), "action"_a,
             "The device of the action's stage and replica.")
        .def("has",
             named<"self", "kind">(+[](const Plan& self, Kind kind) { return self.has(kind); }),
             "kind"_a, "Whether any row holds an action of this kind.")
        .def_property_readonly("first_trained", &Plan::first_trained,
                               "The first stage with a backward; num_stages where none has one.")
        .def("with_frozen", named<"self", "stages">(&with_frozen), "stages"_a,
             "The same plan where these stages have nothing to train: those in front of the first "
             "that does have forwards alone, the others' backwards are B without W.")
        .def("forward_only", &Plan::forward_only, "The same plan with its forward actions only.")
        .def(py::self == py::self)
        .def("__hash__", &hash_of)
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
                return py::make_tuple(self.placement(), self.num_microbatches(), self.rows(),
                                      self.num_slices(), self.overlaps());
            },
            [](const py::tuple& state) {
                return Plan(state[0].cast<Placement>(), state[1].cast<int>(),
                            state[2].cast<std::vector<Row>>(), state[3].cast<int>(),
                            state[4].cast<std::vector<Overlaps>>());
            }));
}

Plan replicated(const Plan& plan, int num_replicas, std::optional<std::int64_t> num_microbatches) {
    const std::int64_t all = std::int64_t{plan.num_microbatches()} * num_replicas;
    return with_replicas(plan, num_replicas, num_microbatches.value_or(all));
}

std::vector<int> checked_versions(const Plan& plan) {
    check(plan);
    return weight_versions(plan);
}

void bind_functions(py::module_& module) {
    module.def("check", named<"plan">(py::overload_cast<const Plan&>(&check)), "plan"_a,
               "Proves that a plan can run, or raises PlanError.");
    module.def("with_reductions", named<"plan", "over_peers">(&with_reductions), "plan"_a,
               "over_peers"_a = false,
               "The plan with a REDUCE for each stage, where it has replicas and a backward; where "
               "`over_peers`, also with one replica, for gradients that other processes add to.");
    module.def("with_replicas", named<"plan", "num_replicas", "num_microbatches">(&replicated),
               "plan"_a, "num_replicas"_a, "num_microbatches"_a = py::none(),
               "The plan on several blocks of devices, each with its share of the microbatches.");
    module.def("with_updates", named<"plan", "group", "delay">(&with_updates), "plan"_a, "group"_a,
               "delay"_a, "The plan with a U for each group of microbatches of a stage.");
    module.def("weight_versions", named<"plan">(&checked_versions), "plan"_a,
               "Most versions of its weights that each stage holds at once.");
}

void bind_rules(py::module_& module) {
    module.attr("MAX_CELLS") = kMaxCells;
    module.def(
        "by_slots",
        named<"placement", "num_microbatches", "group", "group_offset", "unit", "num_slices">(
            &by_slots),
        "placement"_a, "num_microbatches"_a, "group"_a, "group_offset"_a, "unit"_a = 1,
        "num_slices"_a = 1, "A plan from the lattice rule: 1F1B, every wave, Chimera and slices.");
    module.def(
        "by_phases",
        named<"placement", "num_microbatches", "warmup", "group", "weight_delay">(&by_phases),
        "placement"_a, "num_microbatches"_a, "warmup"_a, "group"_a,
        "weight_delay"_a = std::vector<int>{},
        "A plan of warm-up, steady and cool-down: GPipe, interleaved and zero bubble.");
    module.def("by_block",
               named<"placement", "num_microbatches", "forward_slots", "input_slots", "interval",
                     "steady">(&by_block),
               "placement"_a, "num_microbatches"_a, "forward_slots"_a, "input_slots"_a,
               "interval"_a, "steady"_a = false,
               "A plan that repeats the timetable of one microbatch: V-Half and V-Min.");
    module.def("by_program", named<"placement", "num_microbatches", "programs">(&by_program),
               "placement"_a, "num_microbatches"_a, "programs"_a,
               "A plan written out as patterns and how often each is repeated: ZB-V, DualPipeV.");
    module.def("by_list", named<"plan", "cap">(&by_list), "plan"_a, "cap"_a,
               "The plan with each forward as early as inputs and a cap in flight let it start.");
}

}  // namespace

void bind_plan(py::module_& module) {
    bind_plan_error(module);
    bind_action(module);
    bind_placement(module);
    bind_plan_class(module);
    bind_functions(module);
    bind_rules(module);
}

}  // namespace pykern
