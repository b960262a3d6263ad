#include "exec/program.hpp"

#include <utility>

#include "plan/check.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"

namespace pykern {

namespace {

struct Edge {
    Position from;
    Position to;
};

}  // namespace

Program::Program(const Plan& plan) : placement_(plan.placement()), num_slices_(plan.num_slices()) {
    check(plan);
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
        held_[kind] = plan.has(static_cast<Kind>(kind));
    }
    for (int device = 0; device < plan.num_devices(); ++device) {
        row_begin_.push_back(static_cast<Position>(actions_.size()));
        for (const Action& action : plan.rows()[static_cast<std::size_t>(device)]) {
            actions_.push_back(action);
            device_.push_back(device);
        }
    }
    row_begin_.push_back(static_cast<Position>(actions_.size()));

    const Index index(plan);
    std::vector<Edge> edges;
    for (Position to = 0; to < actions_.size(); ++to) {
        const bool first_in_row = to == row_begin(device_[to]);
        if (!first_in_row) edges.push_back({.from = to - 1, .to = to});
        for_each_input(actions_[to], index, [&](Action, int position) {
            const auto from = static_cast<Position>(position);
            const bool is_row_edge = !first_in_row && from == to - 1;
            if (!is_row_edge) edges.push_back({.from = from, .to = to});
        });
    }

    num_inputs_.assign(actions_.size(), 0);
    release_begin_.assign(actions_.size() + 1, 0);
    for (const Edge& edge : edges) {
        ++num_inputs_[edge.to];
        ++release_begin_[edge.from + 1];
    }
    for (std::size_t i = 0; i < actions_.size(); ++i) release_begin_[i + 1] += release_begin_[i];
    releases_.resize(edges.size());
    std::vector<std::size_t> next(release_begin_.begin(), release_begin_.end() - 1);
    for (const Edge& edge : edges) releases_[next[edge.from]++] = edge.to;
}

}  // namespace pykern
