#include "search/extend.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace pykern {

namespace {

struct Part {
    std::size_t begin;
    std::size_t end;
};

// Whether the counts of a device's symbols are those of whole microbatches.
bool holds(const Problem& problem, std::size_t device, const std::vector<std::size_t>& counts,
           std::size_t period) {
    return std::ranges::all_of(problem.stages[device], [&](std::size_t stage) {
        const std::size_t* count = &counts[symbol_of(stage, 0)];
        return count[kForward] == period && count[kInput] == count[kWeight] &&
               count[kInput] + count[kBackward] == period;
    });
}

// The shortest part from `begin` on that holds `period` microbatches of everything.
std::optional<Part> part_at(const Schedule& schedule, std::size_t device, std::size_t begin,
                            std::size_t period) {
    const Problem& problem = schedule.problem();
    const auto& row = schedule.row(device);
    std::vector<std::size_t> counts(problem.time.size(), 0);
    for (std::size_t end = begin; end < row.size(); ++end) {
        const Symbol symbol = row[end].symbol;
        if (++counts[symbol] > period) return std::nullopt;
        const std::size_t least = 2 * period * problem.stages[device].size();
        if (end + 1 - begin < least || !holds(problem, device, counts, period)) continue;
        return Part{begin, end + 1};
    }
    return std::nullopt;
}

// The part that begins nearest to the first action from `moment` on.
std::optional<Part> steady_part(const Schedule& schedule, std::size_t device, std::size_t period,
                                Ticks moment) {
    const std::size_t length = schedule.row(device).size();
    std::size_t near = 0;
    while (near < length && schedule.start(device, near) < moment) ++near;
    for (std::size_t distance = 0; distance < length; ++distance) {
        for (const std::size_t begin : {near + distance, near - distance}) {
            if (begin >= length) continue;  // also where the difference wrapped
            const std::optional<Part> part = part_at(schedule, device, begin, period);
            if (part) return part;
        }
    }
    return std::nullopt;
}

}  // namespace

Order extend(const Schedule& schedule, std::size_t extra, std::size_t period, Ticks moment) {
    Order order;
    for (std::size_t device = 0; device < schedule.problem().num_devices; ++device) {
        const std::optional<Part> part = steady_part(schedule, device, period, moment);
        if (!part) return {};
        const std::vector<Labelled>& row = schedule.row(device);
        Symbols& symbols = order.rows.emplace_back();
        const auto append = [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) symbols.push_back(row[i].symbol);
        };
        append(0, part->begin);
        for (std::size_t i = 0; i < extra / period; ++i) append(part->begin, part->end);
        append(part->begin, row.size());
    }
    return order;
}

}  // namespace pykern
