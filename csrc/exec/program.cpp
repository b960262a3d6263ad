#include "exec/program.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/check.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

std::vector<std::size_t> row_sizes(const Plan& plan) {
    std::vector<std::size_t> sizes;
    for (const Row& row : plan.rows()) sizes.push_back(row.size());
    return sizes;
}

void require_part(const Plan& plan, const std::vector<std::size_t>& begins,
                  const std::vector<std::size_t>& ends) {
    const std::size_t num_rows = plan.rows().size();
    if (begins.size() != num_rows || ends.size() != num_rows) {
        throw std::invalid_argument(
            "a part must have a begin and an end for each of " + std::to_string(num_rows) +
            " rows, got " + std::to_string(begins.size()) + " and " + std::to_string(ends.size()));
    }
    for (std::size_t row = 0; row < num_rows; ++row) {
        const std::size_t size = plan.rows()[row].size();
        if (begins[row] <= ends[row] && ends[row] <= size) continue;
        throw std::invalid_argument(
            "row " + std::to_string(row) + " of the part must be within 0 to " +
            std::to_string(size) + ", the actions of the plan, got " + std::to_string(begins[row]) +
            " to " + std::to_string(ends[row]));
    }
    if (begins == ends) {
        throw std::invalid_argument("a part must have at least one action, got none");
    }
}

}  // namespace

Program::Program(const Plan& plan)
    : Program(plan, std::vector<std::size_t>(plan.rows().size(), 0), row_sizes(plan)) {}

Program Program::part(const Plan& plan, const std::vector<std::size_t>& begins,
                      const std::vector<std::size_t>& ends) {
    require_part(plan, begins, ends);
    return {plan, begins, ends};
}

Program::Program(const Plan& plan, const std::vector<std::size_t>& begins,
                 const std::vector<std::size_t>& ends)
    : placement_(plan.placement()), num_slices_(plan.num_slices()) {
    check(plan);
    for (std::size_t row = 0; row < plan.rows().size(); ++row) {
        row_begin_.push_back(static_cast<Position>(actions_.size()));
        for (std::size_t i = begins[row]; i < ends[row]; ++i) {
            const Action& action = plan.rows()[row][i];
            actions_.push_back(action);
            device_.push_back(static_cast<int>(row));
            held_[static_cast<std::size_t>(action.kind)] = true;
        }
    }
    row_begin_.push_back(static_cast<Position>(actions_.size()));

    const Index index(plan);
    std::vector<Edge> edges;
    for (Position to = 0; to < actions_.size(); ++to) {
        const bool first_in_row = to == row_begin(device_[to]);
        if (!first_in_row) edges.push_back({.from = to - 1, .to = to});
        for_each_input(actions_[to], index, [&](Action input, int position) {
            const int device = plan.device_of(input);
            const auto row = static_cast<std::size_t>(device);
            const auto place = static_cast<std::size_t>(position - index.row_start(device));
            if (place < begins[row]) return;
            if (place >= ends[row]) {
                throw std::invalid_argument("a part must hold the inputs of its actions, got " +
                                            to_text(actions_[to]) + " without " + to_text(input) +
                                            ", which is behind the part");
            }
            const auto from = row_begin(device) + static_cast<Position>(place - begins[row]);
            const bool is_row_edge = !first_in_row && from == to - 1;
            if (!is_row_edge) edges.push_back({.from = from, .to = to});
        });
    }

    connect(edges);
    num_first_inputs_ = num_inputs_;
}

Program Program::endless(const Placement& placement, int num_slots) {
    if (num_slots < 1) {
        throw std::invalid_argument("num_slots must be at least 1, got " +
                                    std::to_string(num_slots));
    }
    return {placement, num_slots};
}

// Slot by slot, and in each stage by stage.
Program::Program(const Placement& placement, int num_slots)
    : placement_(placement), num_slices_(1), num_slots_(num_slots) {
    held_[static_cast<std::size_t>(Kind::F)] = true;
    const int num_replicas = placement.num_replicas();
    std::vector<Edge> edges;
    for (int slot = 0; slot < num_slots; ++slot) {
        // The one before in its replica, which for the first is the last.
        const int before = slot >= num_replicas
                               ? slot - num_replicas
                               : slot + (num_slots - 1 - slot) / num_replicas * num_replicas;
        const auto microbatch = static_cast<std::uint32_t>(slot);
        for (int stage = 0; stage < num_stages(); ++stage) {
            const auto to = static_cast<Position>(actions_.size());
            const auto chain = static_cast<Position>(stage);
            actions_.push_back(
                {.microbatch = microbatch, .stage = static_cast<std::uint16_t>(stage)});
            device_.push_back(placement.device_of(stage, placement.replica_of(microbatch)));
            if (stage > 0) edges.push_back({.from = to - 1, .to = to});
            edges.push_back({.from = entry(before) + chain, .to = to});
        }
    }
    connect(edges);
    for (int slot = 0; slot < num_slots; ++slot) ++num_inputs_[entry(slot)];
    num_first_inputs_ = num_inputs_;
    const Position num_first = entry(std::min(num_slots, num_replicas));
    for (Position position = 0; position < num_first; ++position) --num_first_inputs_[position];
}

Program Program::issuing(Placement placement, int num_slices, Issued issued) {
    return {std::move(placement), num_slices, std::move(issued)};
}

Program::Program(Placement placement, int num_slices, Issued issued)
    : placement_(std::move(placement)),
      num_slices_(num_slices),
      is_issuing_(true),
      actions_(std::move(issued.actions)),
      device_(std::move(issued.devices)),
      row_begin_(std::move(issued.row_begin)) {
    for (Position position = 0; position < row_begin_.back(); ++position) {
        held_[static_cast<std::size_t>(actions_[position].kind)] = true;
    }
    connect(issued.edges);
    num_first_inputs_ = num_inputs_;
}

void Program::connect(const std::vector<Edge>& edges) {
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
