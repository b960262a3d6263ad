#include "plan/generate.hpp"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/check.hpp"
#include "plan/require.hpp"

namespace pykern {

namespace {

struct Slotted {
    std::int64_t slot;
    Action action;

    friend auto operator<=>(const Slotted&, const Slotted&) = default;
};

struct Lattice {
    int num_stages;
    int num_replicas;
    int group;
    int group_offset;
    int unit;
    int num_slices;

    std::int64_t slot_of(Action action) const {
        const auto number = static_cast<int>(action.microbatch) / num_replicas / unit;
        const std::int64_t offset = std::int64_t{2} * num_slices * (number % group) +
                                    std::int64_t{group_offset} * (number / group);
        if (action.kind == Kind::F) return action.stage + offset + std::int64_t{2} * action.slice;
        const int later = 2 * (2 * (num_slices - 1) - action.slice);
        return 2 * num_stages - 1 - action.stage + offset + later;
    }
};

// Where each group starts, and behind them the end. The larger groups come first.
std::vector<int> group_starts(int num_microbatches, int group) {
    const int num_groups = (num_microbatches - 1) / group + 1;
    const int size = num_microbatches / num_groups;
    const int num_larger = num_microbatches % num_groups;
    std::vector<int> starts;
    for (int i = 0; i <= num_groups; ++i) starts.push_back(i * size + std::min(i, num_larger));
    return starts;
}

// All of one device's actions of one kind: group by group, and in each group stage by stage.
Row queue(Kind kind, const std::vector<int>& stages, const std::vector<int>& starts) {
    Row actions;
    for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
        for (const int stage : stages) {
            for (int microbatch = starts[i]; microbatch < starts[i + 1]; ++microbatch) {
                actions.push_back(make_action(kind, stage, microbatch));
            }
        }
    }
    return actions;
}

Row interleave(const Row& forwards, const Row& backwards, std::size_t warmup) {
    Row row(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warmup));
    row.reserve(forwards.size() + backwards.size());
    for (std::size_t i = 0; i < backwards.size(); ++i) {
        if (warmup + i < forwards.size()) row.push_back(forwards[warmup + i]);
        row.push_back(backwards[i]);
    }
    return row;
}

// Every B becomes an I, and its W follows `delay` backwards later; the last ones end the row.
Row split_backward(const Row& whole, std::size_t delay) {
    Row row;
    row.reserve(2 * whole.size());
    Row weights;
    std::size_t issued = 0;
    for (Action action : whole) {
        if (action.kind == Kind::B) {
            weights.push_back(action);
            weights.back().kind = Kind::W;
            action.kind = Kind::I;
        }
        row.push_back(action);
        if (weights.size() > issued + delay) row.push_back(weights[issued++]);
    }
    row.insert(row.end(), weights.begin() + static_cast<std::ptrdiff_t>(issued), weights.end());
    return row;
}

void require_one_each(const char* name, const std::vector<int>& numbers, int num_devices) {
    if (numbers.size() == static_cast<std::size_t>(num_devices)) return;
    throw std::invalid_argument(std::string(name) + " must hold one number for each of " +
                                std::to_string(num_devices) + " devices, got " +
                                std::to_string(numbers.size()));
}

}  // namespace

Plan by_slots(const Placement& placement, int num_microbatches, int group, int group_offset,
              int unit, int num_slices) {
    require_plan_size(placement.num_stages(), num_microbatches, num_slices);
    require_range("group", group, 1, kMaxCells);
    require_range("unit", unit, 1, kMaxCells);
    // Smaller ones would let a microbatch overtake an earlier one.
    require_range("group_offset", group_offset, std::int64_t{2} * num_slices * group, INT32_MAX);
    const Lattice lattice{.num_stages = placement.num_stages(),
                          .num_replicas = placement.num_replicas(),
                          .group = group,
                          .group_offset = group_offset,
                          .unit = unit,
                          .num_slices = num_slices};
    std::vector<std::vector<Slotted>> devices(static_cast<std::size_t>(placement.num_devices()));
    for (int stage = 0; stage < placement.num_stages(); ++stage) {
        for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
            const int replica = placement.replica_of(static_cast<std::uint32_t>(microbatch));
            auto& device = devices[static_cast<std::size_t>(placement.device_of(stage, replica))];
            for (int slice = 0; slice < num_slices; ++slice) {
                for (const Kind kind : {Kind::F, Kind::B}) {
                    const Action action = make_action(kind, stage, microbatch, slice);
                    device.push_back({lattice.slot_of(action), action});
                }
            }
        }
    }
    std::vector<Row> rows;
    for (auto& device : devices) {
        std::ranges::sort(device);
        Row& row = rows.emplace_back();
        for (const Slotted& slotted : device) row.push_back(slotted.action);
    }
    return checked({placement, num_microbatches, std::move(rows), num_slices});
}

Plan by_phases(const Placement& placement, int num_microbatches, const std::vector<int>& warmup,
               int group, const std::vector<int>& weight_delay) {
    require_plan_size(placement.num_stages(), num_microbatches);
    require_range("group", group, 1, kMaxCells);
    require_one_each("warmup", warmup, placement.num_devices());
    if (!weight_delay.empty()) {
        require_one_each("weight_delay", weight_delay, placement.num_devices());
    }
    const std::vector<int> starts = group_starts(num_microbatches, group);
    std::vector<Row> rows;
    for (std::vector<int>& stages : placement.stages_by_device()) {
        const std::size_t device = rows.size();
        const Row forwards = queue(Kind::F, stages, starts);
        const int warmup_here = warmup[device];
        require_range("warm-up", warmup_here, 0, static_cast<std::int64_t>(forwards.size()));
        std::ranges::reverse(stages);
        const Row backwards = queue(Kind::B, stages, starts);
        rows.push_back(interleave(forwards, backwards, static_cast<std::size_t>(warmup_here)));
        if (weight_delay.empty()) continue;
        require_range("weight delay", weight_delay[device], 0, kMaxCells);
        rows.back() = split_backward(rows.back(), static_cast<std::size_t>(weight_delay[device]));
    }
    return checked({placement, num_microbatches, std::move(rows)});
}

}  // namespace pykern
