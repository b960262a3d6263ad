#include "search/problem.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plan/plan.hpp"
#include "plan/stage_values.hpp"

namespace pykern {

namespace {

// A power of two that brings `largest` to 2^31: halves, quarters and eighths stay exact, and the
// sum over the largest plan still fits.
double scale_for(double largest) { return std::exp2(31 - std::ceil(std::log2(largest))); }

// Rounded down, so that no bound is too high, and three thirds are no more than a whole.
Ticks ticks(double value, double scale) { return static_cast<Ticks>(value * scale); }

void require_sizes(const Candidate& candidate, const std::vector<double>& caps) {
    const Placement& placement = candidate.placement;
    candidate.costs.require_fits(placement.num_stages(), placement.num_devices());
    if (candidate.costs.table().shared_links) {
        throw std::invalid_argument(
            "shared_links must be False for a search, which sends every message at once, got True");
    }
    candidate.memory.require_stages(placement.num_stages());
    if (placement.num_replicas() != 1) {
        throw std::invalid_argument("num_replicas must be 1 for a search, got " +
                                    std::to_string(placement.num_replicas()));
    }
    require_values("caps", caps);
    require_stages("caps", caps, placement.num_devices());
}

void fill_placement(Problem& problem, const Placement& placement) {
    problem.num_devices = static_cast<std::size_t>(placement.num_devices());
    problem.num_stages = static_cast<std::size_t>(placement.num_stages());
    problem.stages.resize(problem.num_devices);
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        const auto device = static_cast<std::size_t>(placement.device_of(static_cast<int>(stage)));
        problem.device_of.push_back(device);
        problem.stages[device].push_back(stage);
    }
}

bool knows_split(const Costs& costs, std::size_t stage) {
    return !std::isnan(costs.of(Kind::I, stage)) && !std::isnan(costs.of(Kind::W, stage));
}

// Halves that are not known take what the whole takes each: then no split wins anything.
double known_ns(const Costs& costs, Kind kind, std::size_t stage) {
    const bool is_half = kind == Kind::I || kind == Kind::W;
    if (is_half && !knows_split(costs, stage)) kind = Kind::B;
    costs.require_known(kind, static_cast<int>(stage));
    return costs.of(kind, stage);
}

void fill_times(Problem& problem, const Costs& costs) {
    const CostTable& table = costs.table();
    std::vector<double> times_ns;
    std::vector<double> hops_ns(problem.num_stages, 0);
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        const std::size_t device = problem.device_of[stage];
        const double speed = value_of(table.device_speeds, device);
        problem.may_split.push_back(knows_split(costs, stage));
        for (const Kind kind : {Kind::F, Kind::I, Kind::W, Kind::B}) {
            times_ns.push_back(table.overhead_ns + known_ns(costs, kind, stage) / speed);
        }
        const bool last = stage + 1 == problem.num_stages;
        if (last || problem.device_of[stage + 1] == device) continue;
        hops_ns[stage] = table.transfer_ns + costs.message_ns(stage);
    }
    const double largest =
        std::max(*std::ranges::max_element(times_ns), *std::ranges::max_element(hops_ns));
    if (largest <= 0) {
        throw std::invalid_argument(
            "costs must have an action that takes time for a search, got none");
    }
    problem.ticks_per_ns = scale_for(largest);
    for (const double time_ns : times_ns) {
        // Every action takes a moment, so that what comes later starts later.
        problem.time.push_back(std::max<Ticks>(1, ticks(time_ns, problem.ticks_per_ns)));
    }
    for (const double hop_ns : hops_ns) {
        problem.hop.push_back(ticks(hop_ns, problem.ticks_per_ns));
    }
}

void fill_memory(Problem& problem, const Memory& memory, const std::vector<double>& caps) {
    double largest = 0;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        largest = std::max(largest, value_of(memory.activation_bytes(), stage));
    }
    // Without activations there is nothing to cap.
    const double scale = largest > 0 ? scale_for(largest) : 1;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        const Ticks held = ticks(value_of(memory.activation_bytes(), stage), scale);
        const Ticks kept = std::min(held, ticks(value_of(memory.kept_bytes(), stage), scale));
        problem.takes.insert(problem.takes.end(), {held, kept - held, -kept, -held});
    }
    for (const double cap : caps) {
        problem.cap.push_back(std::llround(std::min(cap * scale, std::exp2(52))));
    }
}

}  // namespace

Ticks Problem::work(std::size_t device) const {
    Ticks sum = 0;
    for (const std::size_t stage : stages[device]) {
        const Ticks* op = &time[symbol_of(stage, 0)];
        sum += op[kForward] + std::min(op[kBackward], op[kInput] + op[kWeight]);
    }
    return sum;
}

bool Problem::split_has_price() const {
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        const Ticks* op = &time[symbol_of(stage, 0)];
        if (op[kBackward] < op[kInput] + op[kWeight]) return true;
    }
    return false;
}

bool Problem::fits() const {
    for (std::size_t device = 0; device < num_devices; ++device) {
        Ticks held = 0;
        for (const std::size_t stage : stages[device]) held += takes[symbol_of(stage, kForward)];
        if (forwards_first) held *= static_cast<Ticks>(num_microbatches);
        if (held > cap[device]) return false;
    }
    return true;
}

Problem make_problem(const Candidate& candidate, int num_microbatches,
                     const std::vector<double>& caps) {
    require_plan_size(candidate.placement.num_stages(), num_microbatches);
    require_sizes(candidate, caps);
    Problem problem;
    problem.num_microbatches = static_cast<std::size_t>(num_microbatches);
    problem.forwards_first = candidate.forwards_first;
    fill_placement(problem, candidate.placement);
    fill_times(problem, candidate.costs);
    fill_memory(problem, candidate.memory, caps);
    return problem;
}

}  // namespace pykern
