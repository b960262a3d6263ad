#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "interpreter_lock.hpp"
#include "search/search.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

py::tuple as_tuple(const std::vector<double>& values) {
    const py::tuple result(py::cast(values));
    return result;
}

// So that an interrupt ends a search at once.
void raise_interrupts() {
    const Locked lock;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

SearchResult search_without_lock(const std::vector<Candidate>& candidates, int num_microbatches,
                                 const std::vector<double>& caps,
                                 const std::vector<std::pair<std::size_t, Plan>>& seeds,
                                 double budget_ms, std::uint64_t random_seed) {
    std::vector<Seed> all;
    all.reserve(seeds.size());
    for (const auto& [candidate, plan] : seeds) all.push_back({candidate, plan});
    const Unlocked unlocked;
    return search(candidates, num_microbatches, caps, all,
                  {.budget_ms = budget_ms, .random_seed = random_seed, .poll = raise_interrupts});
}

}  // namespace

void bind_search(py::module_& module) {
    py::class_<Candidate>(module, "Candidate",
                          "One way to lay a model out, with what it then costs and holds.")
        .def(py::init<Placement, Costs, Memory, bool>(), "placement"_a, "costs"_a, "memory"_a,
             "forwards_first"_a = false)
        .def_readonly("placement", &Candidate::placement)
        .def_readonly("costs", &Candidate::costs)
        .def_readonly("memory", &Candidate::memory);

    py::class_<SearchResult>(module, "SearchResult", "The best plan that a search found.")
        .def_readonly("plan", &SearchResult::plan)
        .def_readonly("makespan_ns", &SearchResult::makespan_ns)
        .def_readonly("bound_ns", &SearchResult::bound_ns)
        .def_readonly("proven", &SearchResult::proven)
        .def_property_readonly(
            "seed_makespans_ns",
            [](const SearchResult& self) { return as_tuple(self.seed_makespans_ns); },
            "The makespan of each seed in the order given; infinite where it breaks the cap.")
        .def_property_readonly(
            "peaks", [](const SearchResult& self) { return as_tuple(self.peaks); },
            "Most that each device holds at once, in the unit of the caps.")
        .def_readonly("work", &SearchResult::work);

    module.attr("WORK_PER_MS") = kWorkPerMs;
    module.def("search", &search_without_lock, "candidates"_a, "num_microbatches"_a, "caps"_a,
               "seeds"_a, "budget_ms"_a, "random_seed"_a,
               "The best plan of the candidates that keeps each device under its cap, never worse "
               "than a seed that does.");
}

}  // namespace pykern
