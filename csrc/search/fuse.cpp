#include "search/fuse.hpp"

#include <algorithm>

namespace pykern {

namespace {

// The position of the W that belongs to the I at this position, or the row's size.
std::size_t find_weight(const std::vector<Labelled>& row, std::size_t input) {
    const Labelled weight{symbol_of(stage_of(row[input].symbol), kWeight), row[input].microbatch};
    const auto from = row.begin() + static_cast<std::ptrdiff_t>(input);
    return static_cast<std::size_t>(std::find(from, row.end(), weight) - row.begin());
}

}  // namespace

bool try_fuse(Schedule& schedule, std::size_t device, std::size_t input, std::size_t weight,
              Ticks limit) {
    const Symbol other = schedule.row(device)[weight].symbol;
    for (std::size_t between = input + 1; between < weight; ++between) {
        if (schedule.row(device)[between].symbol == other) return false;
    }
    std::vector<Labelled>& row = schedule.edit(device);
    row[input].symbol = symbol_of(stage_of(row[input].symbol), kBackward);
    row.erase(row.begin() + static_cast<std::ptrdiff_t>(weight));
    return schedule.try_row(input, weight - 1, limit);
}

void fuse_all(Schedule& schedule, std::int64_t work) {
    const std::int64_t end = schedule.work() + work;
    for (std::size_t device = 0; device < schedule.problem().num_devices; ++device) {
        // From the back, where little has to be timed again.
        for (std::size_t i = schedule.row(device).size(); i-- > 0;) {
            if (schedule.work() >= end) return;
            const std::vector<Labelled>& row = schedule.row(device);
            if (op_of(row[i].symbol) != kInput) continue;
            const std::size_t weight = find_weight(row, i);
            if (try_fuse(schedule, device, i, weight, schedule.makespan())) schedule.accept();
        }
    }
}

Order split_all(const Order& order) {
    Order split;
    for (const Symbols& row : order.rows) {
        Symbols& symbols = split.rows.emplace_back();
        for (const Symbol symbol : row) {
            const std::size_t stage = stage_of(symbol);
            const bool whole = op_of(symbol) == kBackward;
            symbols.push_back(whole ? symbol_of(stage, kInput) : symbol);
            if (whole) symbols.push_back(symbol_of(stage, kWeight));
        }
    }
    return split;
}

Order merge_unknown(const Problem& problem, const Order& order) {
    Order merged;
    for (const Symbols& row : order.rows) {
        Symbols& symbols = merged.rows.emplace_back();
        for (const Symbol symbol : row) {
            const std::size_t stage = stage_of(symbol);
            const bool split = problem.may_split[stage];
            if (!split && op_of(symbol) == kWeight) continue;
            const bool merge = !split && op_of(symbol) == kInput;
            symbols.push_back(merge ? symbol_of(stage, kBackward) : symbol);
        }
    }
    return merged;
}

}  // namespace pykern
