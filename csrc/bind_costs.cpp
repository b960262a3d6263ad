#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bind.hpp"
#include "named.hpp"
#include "plan/check.hpp"
#include "plan/costs.hpp"
#include "plan/memory.hpp"
#include "plan/recompute.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

// The arguments that make these costs again, in the order of the signature.
py::dict arguments(const Costs& costs) {
    const CostTable& table = costs.table();
    return py::dict("forward_ns"_a = table.forward_ns, "backward_ns"_a = table.backward_ns,
                    "transfer_ns"_a = table.transfer_ns, "recompute_ns"_a = table.recompute_ns,
                    "input_ns"_a = table.input_ns, "weight_ns"_a = table.weight_ns,
                    "update_ns"_a = table.update_ns, "reduce_ns"_a = table.reduce_ns,
                    "overhead_ns"_a = table.overhead_ns, "message_bytes"_a = table.message_bytes,
                    "bandwidth"_a = table.bandwidth, "shared_links"_a = table.shared_links,
                    "overlap"_a = table.overlap, "device_speeds"_a = table.device_speeds);
}

std::string written(const Costs& costs) {
    std::string text = "Costs(";
    for (const auto& [name, value] : arguments(costs)) {
        if (text.back() != '(') text += ", ";
        text += py::str("{}={!r}").format(name, value).cast<std::string>();
    }
    return text + ")";
}

void bind_fields(py::class_<Costs>& costs) {
    for (const auto& [name, value] : arguments(Costs(0.0, 0.0))) {
        const auto field = name.cast<std::string>();
        costs.def_property_readonly(field.c_str(), [field](const Costs& self) {
            return py::object(arguments(self)[field.c_str()]);
        });
    }
}

using Values = std::optional<StageValues>;

// kept_bytes is activation_bytes where it is not given: everything is freed after W.
Memory memory_of(const StageValues& activation, const Values& kept, const StageValues& boundary,
                 const Values& rebuilt) {
    return {activation, kept.value_or(activation), boundary, rebuilt};
}

std::vector<double> checked_peaks(const Plan& plan, const Memory& memory) {
    check(plan);
    return peak_bytes(plan, memory);
}

void check_plan_and_memory(const Plan& plan, const Memory& memory, double cap_bytes) {
    check(plan);
    check_memory(plan, memory, cap_bytes);
}

void bind_costs_class(py::module_& module) {
    const CostTable by_default{.forward_ns = 0.0, .backward_ns = 0.0};
    py::class_<Costs> costs(module, "Costs",
                            "How long each action takes, in nanoseconds: a number for every "
                            "stage, or a list with one for each.");
    costs.def(
        py::init(named<"forward_ns", "backward_ns", "transfer_ns", "recompute_ns", "input_ns",
                       "weight_ns", "update_ns", "reduce_ns", "overhead_ns", "message_bytes",
                       "bandwidth", "shared_links", "overlap", "device_speeds">(
            +[](const StageValues& forward_ns, const StageValues& backward_ns, double transfer_ns,
                const Values& recompute_ns, const Values& input_ns, const Values& weight_ns,
                const StageValues& update_ns, const StageValues& reduce_ns, double overhead_ns,
                const StageValues& message_bytes, double bandwidth, bool shared_links,
                double overlap, const StageValues& device_speeds) {
                return Costs(CostTable{forward_ns, backward_ns, transfer_ns, recompute_ns, input_ns,
                                       weight_ns, update_ns, reduce_ns, overhead_ns, message_bytes,
                                       bandwidth, shared_links, overlap, device_speeds});
            })),
        "forward_ns"_a, "backward_ns"_a, "transfer_ns"_a = by_default.transfer_ns, py::kw_only(),
        "recompute_ns"_a = py::none(), "input_ns"_a = py::none(), "weight_ns"_a = py::none(),
        "update_ns"_a = by_default.update_ns, "reduce_ns"_a = by_default.reduce_ns,
        "overhead_ns"_a = by_default.overhead_ns, "message_bytes"_a = by_default.message_bytes,
        "bandwidth"_a = by_default.bandwidth, "shared_links"_a = by_default.shared_links,
        "overlap"_a = by_default.overlap, "device_speeds"_a = by_default.device_speeds);
    bind_fields(costs);
    costs.def(py::self == py::self)
        .def("__repr__", &written)
        .def(py::pickle(&arguments, [](const py::dict& state) {
            return py::type::of<Costs>()(**state).cast<Costs>();
        }));
}

void bind_memory(py::module_& module) {
    py::class_<Memory>(module, "Memory",
                       "Bytes that one microbatch holds on one stage, a number for every stage or "
                       "a list.")
        .def(py::init(named<"activation_bytes", "kept_bytes", "boundary_bytes", "rebuilt_bytes">(
                 &memory_of)),
             "activation_bytes"_a, "kept_bytes"_a = py::none(), "boundary_bytes"_a = 0.0,
             "rebuilt_bytes"_a = py::none())
        .def_property_readonly("activation_bytes", &Memory::activation_bytes)
        .def_property_readonly("kept_bytes", &Memory::kept_bytes)
        .def_property_readonly("boundary_bytes", &Memory::boundary_bytes)
        .def_property_readonly("rebuilt_bytes", &Memory::rebuilt_bytes)
        .def(py::self == py::self)
        .def("__repr__",
             [](const Memory& self) {
                 return py::str(
                            "Memory(activation_bytes={}, kept_bytes={}, boundary_bytes={}, "
                            "rebuilt_bytes={})")
                     .format(self.activation_bytes(), self.kept_bytes(), self.boundary_bytes(),
                             self.rebuilt_bytes());
             })
        .def(py::pickle(
            [](const Memory& self) {
                return py::make_tuple(self.activation_bytes(), self.kept_bytes(),
                                      self.boundary_bytes(), self.rebuilt_bytes());
            },
            [](const py::tuple& state) {
                return Memory(state[0].cast<StageValues>(), state[1].cast<StageValues>(),
                              state[2].cast<StageValues>(), state[3].cast<StageValues>());
            }));
}

}  // namespace

void bind_costs(py::module_& module) {
    bind_costs_class(module);
    bind_memory(module);
    module.def("check_memory", named<"plan", "memory", "cap_bytes">(&check_plan_and_memory),
               "plan"_a, "memory"_a, "cap_bytes"_a,
               "Raises PlanError where a device would hold more than the cap at once.");
    module.def("peak_bytes", named<"plan", "memory">(&checked_peaks), "plan"_a, "memory"_a,
               "Most bytes that each device holds at once.");
    module.def("with_recompute",
               named<"plan", "cells", "costs", "memory", "cap_bytes">(&with_recompute), "plan"_a,
               "cells"_a, "costs"_a, "memory"_a = py::none(),
               "cap_bytes"_a = std::numeric_limits<double>::infinity(),
               "The plan with these R, each where its device would otherwise wait, as early as\n"
               "memory allows, or right before its B or I.");
}

}  // namespace pykern
