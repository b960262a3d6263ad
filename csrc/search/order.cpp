#include "search/order.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace pykern {

namespace {

std::optional<Symbol> op_of_kind(Kind kind) {
    switch (kind) {
        case Kind::F:
            return kForward;
        case Kind::I:
            return kInput;
        case Kind::W:
            return kWeight;
        case Kind::B:
            return kBackward;
        default:
            return std::nullopt;
    }
}

Kind kind_of(Symbol symbol) {
    constexpr std::array kKinds{Kind::F, Kind::I, Kind::W, Kind::B};
    return kKinds.at(op_of(symbol));
}

}  // namespace

bool label(const Problem& problem, std::size_t device, const Symbols& row,
           std::vector<Labelled>& labelled) {
    std::vector<std::uint32_t> forwards(problem.num_stages);
    std::vector<std::uint32_t> backwards(problem.num_stages);
    std::vector<std::size_t> weights(problem.num_stages);
    std::vector<std::vector<std::uint32_t>> inputs(problem.num_stages);
    labelled.clear();
    for (const Symbol symbol : row) {
        const std::size_t stage = stage_of(symbol);
        std::uint32_t microbatch = 0;
        if (op_of(symbol) == kForward) {
            if (problem.forwards_first && !labelled.empty() &&
                op_of(labelled.back().symbol) != kForward) {
                return false;
            }
            microbatch = forwards[stage]++;
        } else if (op_of(symbol) == kWeight) {
            if (weights[stage] == inputs[stage].size()) return false;
            microbatch = inputs[stage][weights[stage]++];
        } else {
            if (backwards[stage] == forwards[stage]) return false;
            microbatch = backwards[stage]++;
            if (op_of(symbol) == kInput) inputs[stage].push_back(microbatch);
        }
        labelled.push_back({symbol, microbatch});
    }
    return std::ranges::all_of(problem.stages[device], [&](std::size_t stage) {
        return forwards[stage] == problem.num_microbatches &&
               backwards[stage] == problem.num_microbatches &&
               weights[stage] == inputs[stage].size();
    });
}

std::optional<Order> order_of(const Plan& plan) {
    Order order;
    for (const Row& actions : plan.rows()) {
        Symbols& row = order.rows.emplace_back();
        for (const Action& action : actions) {
            const std::optional<Symbol> op = op_of_kind(action.kind);
            if (!op) return std::nullopt;
            row.push_back(symbol_of(action.stage, *op));
        }
    }
    return order;
}

Plan plan_of(const Problem& problem, const Placement& placement, const Order& order) {
    std::vector<Row> rows;
    std::vector<Labelled> labelled;
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        Row& row = rows.emplace_back();
        label(problem, device, order.rows[device], labelled);
        for (const Labelled& each : labelled) {
            row.push_back(make_action(kind_of(each.symbol),
                                      static_cast<std::int64_t>(stage_of(each.symbol)),
                                      each.microbatch));
        }
    }
    return {placement, static_cast<int>(problem.num_microbatches), std::move(rows)};
}

}  // namespace pykern
