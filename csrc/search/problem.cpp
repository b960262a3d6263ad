#include "search/problem.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plan/plan.hpp"
#include "search/stage_costs.hpp"

namespace pykern {

namespace {

// A power of two that brings `largest` to 2^31: halves, quarters and eighths stay exact, and the
// sum over the largest plan still fits.
double scale_for(double largest) { return std::exp2(31 - std::ceil(std::log2(largest))); }

Ticks ticks(double value, double scale) { return std::llround(value * scale); }

void require_list(const char* name, const std::vector<double>& list, std::size_t size,
                  const char* of) {
    if (list.size() != size) {
        throw std::invalid_argument(std::string(name) + " must hold one number for each of " +
                                    std::to_string(size) + " " + of + ", got " +
                                    std::to_string(list.size()));
    }
    for (std::size_t i = 0; i < size; ++i) {
        if (!std::isfinite(list[i]) || list[i] < 0) {
            throw std::invalid_argument(std::string(name) + " must be finite and not negative, got " +
                                        std::to_string(list[i]) + " at " + std::to_string(i));
        }
    }
}

void require_sizes(const Candidate& candidate, const std::vector<double>& caps) {
    const auto num_stages = static_cast<std::size_t>(candidate.placement.num_stages());
    require_list("activation", candidate.activation, num_stages, "stages");
    require_list("kept", candidate.kept, num_stages, "stages");
    require_list("caps", caps, static_cast<std::size_t>(candidate.placement.num_devices()),
                 "devices");
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        if (candidate.kept[stage] > candidate.activation[stage]) {
            throw std::invalid_argument("stage " + std::to_string(stage) + " keeps " +
                                        std::to_string(candidate.kept[stage]) +
                                        " of an activation of " +
                                        std::to_string(candidate.activation[stage]));
        }
    }
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

void fill_times(Problem& problem, const Costs& costs) {
    std::vector<double> times_ns;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        for (const double time_ns : op_times_ns(costs, static_cast<int>(stage))) {
            times_ns.push_back(time_ns);
        }
    }
    const double largest = std::max(*std::ranges::max_element(times_ns), costs.transfer_ns());
    if (largest <= 0) throw std::invalid_argument("a search needs an action that takes time");
    problem.ticks_per_ns = scale_for(largest);
    for (const double time_ns : times_ns) {
        problem.time.push_back(ticks(time_ns, problem.ticks_per_ns));
    }
    problem.hop.assign(problem.num_stages, 0);
    for (std::size_t stage = 0; stage + 1 < problem.num_stages; ++stage) {
        const bool moves = problem.device_of[stage] != problem.device_of[stage + 1];
        if (moves) problem.hop[stage] = ticks(costs.transfer_ns(), problem.ticks_per_ns);
    }
}

void fill_memory(Problem& problem, const Candidate& candidate, const std::vector<double>& caps) {
    const double largest = *std::ranges::max_element(candidate.activation);
    // Without activations there is nothing to cap.
    const double scale = largest > 0 ? scale_for(largest) : 1;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        const Ticks held = ticks(candidate.activation[stage], scale);
        const Ticks kept = ticks(candidate.kept[stage], scale);
        problem.takes.insert(problem.takes.end(), {held, kept - held, -kept, -held});
    }
    const double most = std::exp2(52);
    for (const double cap : caps) {
        // Three thirds are a whole, whichever way they were rounded.
        problem.cap.push_back(ticks(std::min(cap * (1 + 1e-8) * scale, most), 1));
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
        if (held > cap[device]) return false;
    }
    return true;
}

Problem make_problem(const Candidate& candidate, int num_microbatches,
                     const std::vector<double>& caps) {
    require_plan_size(candidate.placement.num_stages(), num_microbatches);
    candidate.costs.require_stages(candidate.placement.num_stages());
    require_sizes(candidate, caps);
    Problem problem;
    problem.num_microbatches = static_cast<std::size_t>(num_microbatches);
    fill_placement(problem, candidate.placement);
    fill_times(problem, candidate.costs);
    fill_memory(problem, candidate, caps);
    return problem;
}

}  // namespace pykern
