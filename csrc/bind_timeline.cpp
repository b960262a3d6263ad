#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "named.hpp"
#include "plan/costs.hpp"
#include "plan/explain.hpp"
#include "plan/shades.hpp"
#include "plan/simulate.hpp"
#include "plan/text.hpp"
#include "plan/timeline.hpp"
#include "plan/visible.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

std::vector<std::vector<Span>> spans_of(const Timeline& timeline, Kind kind) {
    std::vector<std::vector<Span>> found;
    for (const std::vector<Span>& row : timeline.rows()) {
        std::vector<Span>& spans = found.emplace_back();
        std::ranges::copy_if(row, std::back_inserter(spans),
                             [kind](const Span& span) { return span.action.kind == kind; });
    }
    return found;
}

std::vector<Kind> kinds_of(const Timeline& timeline) {
    std::array<bool, kNumKinds> found{};
    for (const std::vector<Span>& row : timeline.rows()) {
        for (const Span& span : row) found[static_cast<std::size_t>(span.action.kind)] = true;
    }
    std::vector<Kind> kinds;
    for (std::size_t kind = 0; kind < found.size(); ++kind) {
        if (found[kind]) kinds.push_back(static_cast<Kind>(kind));
    }
    return kinds;
}

void bind_shades(py::module_& module) {
    py::class_<Shades>(module, "Shades",
                       "Which replica and which chunk each action of a timeline belongs to, as a "
                       "number from light to dark.")
        .def(py::init<const Timeline&>(), "timeline"_a)
        .def_property_readonly("num_replicas", &Shades::num_replicas)
        .def_property_readonly("num_chunks", &Shades::num_chunks)
        .def_property_readonly("num_shades", &Shades::num_shades)
        .def("shade_of", &Shades::shade_of, "device"_a, "action"_a, "From 0, the lightest.");
}

void bind_bubble(py::module_& module) {
    py::class_<Bubble>(module, "Bubble",
                       "The idle time of one device, by cause; the parts add up to the whole.")
        .def(py::init<double, double, double, double, double>(), "before_first_ns"_a,
             "after_last_ns"_a, "compute_ns"_a, "transfer_ns"_a, "issue_ns"_a = 0.0)
        .def_readonly("before_first_ns", &Bubble::before_first_ns)
        .def_readonly("after_last_ns", &Bubble::after_last_ns)
        .def_readonly("compute_ns", &Bubble::compute_ns,
                      "Between actions, while the input that came last was being computed.")
        .def_readonly("transfer_ns", &Bubble::transfer_ns,
                      "Between actions, while the input that came last was on its way.")
        .def_readonly("issue_ns", &Bubble::issue_ns,
                      "Between actions, while all inputs were there; 0 in a simulation.")
        .def(py::self == py::self)
        .def("__repr__", [](const Bubble& self) {
            return py::str(
                       "Bubble(before_first_ns={}, after_last_ns={}, compute_ns={}, "
                       "transfer_ns={}, issue_ns={})")
                .format(self.before_first_ns, self.after_last_ns, self.compute_ns, self.transfer_ns,
                        self.issue_ns);
        });
}

void bind_step(py::module_& module) {
    py::native_enum<Wait>(module, "Wait", "enum.Enum",
                          "The reason why an action did not start earlier.")
        .value("NOTHING", Wait::NOTHING)
        .value("ROW", Wait::ROW)
        .value("INPUT", Wait::INPUT)
        .value("TRANSFER", Wait::TRANSFER)
        .finalize();
    py::class_<Step>(module, "Step", "One action of a critical path.")
        .def(py::init<int, Span, Wait>(), "device"_a, "span"_a, "wait"_a)
        .def_readonly("device", &Step::device)
        .def_readonly("span", &Step::span)
        .def_readonly("wait", &Step::wait)
        .def(py::self == py::self)
        .def("__repr__", [](const Step& self) {
            return py::str("Step(device={}, span={}, wait={})")
                .format(self.device, self.span, self.wait);
        });
}

Span span_of(Action action, double start_ns, double end_ns) { return {action, start_ns, end_ns}; }

void bind_span(py::module_& module) {
    py::class_<Span>(module, "Span", "One action with its start and end.")
        .def(py::init(named<"action", "start_ns", "end_ns">(&span_of)), "action"_a, "start_ns"_a,
             "end_ns"_a)
        .def_readonly("action", &Span::action)
        .def_readonly("start_ns", &Span::start_ns)
        .def_readonly("end_ns", &Span::end_ns)
        .def(py::self == py::self)
        .def(py::pickle(
            [](const Span& self) {
                return py::make_tuple(self.action, self.start_ns, self.end_ns);
            },
            [](const py::tuple& state) {
                return Span{state[0].cast<Action>(), state[1].cast<double>(),
                            state[2].cast<double>()};
            }))
        .def("__repr__", [](const Span& self) {
            return py::str("Span({}, start_ns={}, end_ns={})")
                .format(to_text(self.action), self.start_ns, self.end_ns);
        });
}

std::vector<Span> visible_of(const Timeline& self, int device, double origin_ns,
                             double columns_per_ns) {
    const int row = in_range("device", device, self.num_devices());
    return visible(self.rows()[static_cast<std::size_t>(row)], origin_ns, columns_per_ns);
}

void bind_rows(py::module_& module) {
    py::class_<Timeline>(module, "Timeline", "The times of actions, predicted or measured.")
        .def(py::init(named<"rows">(&made<Timeline, std::vector<std::vector<Span>>>)), "rows"_a)
        .def_property_readonly("rows",
                               [](const Timeline& self) { return tuple_of_tuples(self.rows()); })
        .def("spans_of", named<"self", "kind">(&spans_of), "kind"_a,
             "A row for each device with its spans of that kind alone: much faster than all rows "
             "where these are few.")
        .def_property_readonly("kinds", &kinds_of, "The kinds that occur, in their usual order.")
        .def(
            "visible", &visible_of, "device"_a, "origin_ns"_a, "columns_per_ns"_a,
            "The device's spans that are seen when time is cut into columns and each is drawn over "
            "those before it: much faster than all rows where actions are narrow.")
        .def_property_readonly("num_devices", &Timeline::num_devices)
        .def_property_readonly("first_start_ns", &Timeline::first_start_ns,
                               "The first start of all devices; 0 where nothing ran.")
        .def_property_readonly("makespan_ns", &Timeline::makespan_ns,
                               "From the first start to the last end over all devices.")
        .def_property_readonly("bubble_ratio", &Timeline::bubble_ratio,
                               "Idle device time divided by makespan, 0 to 1.")
        .def_property_readonly("span_ns", &Timeline::span_ns,
                               "The time of the device that takes longest, from its first start to "
                               "its last end. It is the cost of the zero-bubble papers.")
        .def_property_readonly("span_bubble_ratio", &Timeline::span_bubble_ratio,
                               "Idle device time within span_ns divided by it, 0 to 1.")
        .def("busy_ns", named<"self", "device">(+[](const Timeline& self, int device) {
                 return self.busy_ns(in_range("device", device, self.num_devices()));
             }),
             "device"_a, "Time in which the device computes.")
        .def("peak_in_flight", named<"self", "device">(+[](const Timeline& self, int device) {
                 return self.peak_in_flight(in_range("device", device, self.num_devices()));
             }),
             "device"_a, "Most microbatches that the device holds at once, counted in chunks.")
        .def(py::self == py::self)
        .def(py::pickle(
            [](const Timeline& self) { return self.rows(); },
            [](std::vector<std::vector<Span>> rows) { return Timeline(std::move(rows)); }))
        .def("__repr__", [](const Timeline& self) {
            return py::str("<Timeline num_devices={} makespan_ns={:.6g} bubble_ratio={:.4f}>")
                .format(self.num_devices(), self.makespan_ns(), self.bubble_ratio());
        });
}

}  // namespace

void bind_timeline(py::module_& module) {
    bind_span(module);
    bind_rows(module);
    bind_bubble(module);
    bind_step(module);
    bind_shades(module);
    module.def("simulate", named<"plan", "costs">(&simulate), "plan"_a, "costs"_a,
               "The timeline that a plan would take with these costs.");
    // pybind11 tries the second one with what the first does not take.
    using OfPlan = Named<"plan", const Plan&>;
    using OfStep = Named<"measured", const Timeline&>;
    module.def(
        "bubbles", [](OfPlan plan, const Costs& costs) { return bubbles(plan.value, costs); },
        "plan"_a, "costs"_a, "Why each device idles in the simulated timeline.");
    module.def(
        "bubbles", [](OfPlan plan, OfStep step) { return bubbles(plan.value, step.value); },
        "plan"_a, "measured"_a, "Why each device idled in a step of the plan.");
    module.def(
        "critical_path",
        [](OfPlan plan, const Costs& costs) { return critical_path(plan.value, costs); }, "plan"_a,
        "costs"_a,
        "The actions that decide the simulated makespan, from the start to the last end.");
    module.def(
        "critical_path",
        [](OfPlan plan, OfStep step) { return critical_path(plan.value, step.value); }, "plan"_a,
        "measured"_a, "The actions that decided the makespan of a step of the plan.");
}

}  // namespace pykern
