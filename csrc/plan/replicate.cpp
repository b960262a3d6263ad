#include "plan/replicate.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan/check.hpp"
#include "plan/require.hpp"

namespace pykern {

namespace {

void require_shares(const Plan& plan, int num_replicas, std::int64_t num_microbatches) {
    require_range("num_replicas", num_replicas, 1, kMaxStages);
    const std::int64_t most = std::int64_t{plan.num_microbatches()} * num_replicas;
    const std::int64_t least = std::max<std::int64_t>(most - num_replicas + 1, num_replicas);
    if (num_microbatches < least || num_microbatches > most) {
        throw std::invalid_argument(
            "num_microbatches must be " + std::to_string(least) + " to " + std::to_string(most) +
            " for " + std::to_string(num_replicas) + " replicas of a plan of " +
            std::to_string(plan.num_microbatches()) + ", got " + std::to_string(num_microbatches));
    }
    require_range("num_devices of all replicas", std::int64_t{plan.num_devices()} * num_replicas, 1,
                  kMaxStages);
    require_range("replicas of all blocks",
                  std::int64_t{plan.placement().num_replicas()} * num_replicas, 1, kMaxStages);
    require_range("num_microbatches", num_microbatches, 1, kMaxCells);
    require_plan_size(plan.num_stages(), static_cast<int>(num_microbatches), plan.num_slices());
    for (const Kind kind : {Kind::REDUCE, Kind::U}) {
        if (!plan.has(kind)) continue;
        throw std::invalid_argument(
            "plan must have neither REDUCE nor U to be replicated, got some. Both stand once for "
            "all replicas of a stage: add them afterwards");
    }
}

Placement in_blocks(const Placement& placement, int num_replicas) {
    std::vector<Replica> replicas;
    for (const Replica& devices : placement.replicas()) {
        for (int block = 0; block < num_replicas; ++block) {
            Replica& moved = replicas.emplace_back(devices);
            for (int& device : moved) device += block * placement.num_devices();
        }
    }
    return {placement.num_devices() * num_replicas, std::move(replicas)};
}

// The rows of all blocks.
class Blocks {
   public:
    Blocks(int num_replicas, int num_microbatches)
        : num_replicas_(static_cast<std::uint32_t>(num_replicas)),
          num_microbatches_(static_cast<std::uint32_t>(num_microbatches)) {}

    void add(const Row& row, const Overlaps& starts, std::uint32_t block) {
        Row& dealt = rows.emplace_back();
        Overlaps& pairs = overlaps.emplace_back();
        auto start = starts.begin();
        for (std::size_t position = 0; position < row.size(); ++position) {
            const bool pair = start != starts.end() && *start == position;
            if (pair) ++start;
            const Action action = in_block(row[position], block);
            if (!exists(action)) continue;
            if (pair && exists(in_block(row[position + 1], block))) pairs.push_back(dealt.size());
            dealt.push_back(action);
        }
    }

    std::vector<Row> rows;
    std::vector<Overlaps> overlaps;

   private:
    Action in_block(Action action, std::uint32_t block) const {
        action.microbatch = action.microbatch * num_replicas_ + block;
        return action;
    }
    bool exists(Action action) const { return action.microbatch < num_microbatches_; }

    std::uint32_t num_replicas_;
    std::uint32_t num_microbatches_;
};

}  // namespace

Plan with_replicas(const Plan& plan, int num_replicas, std::int64_t num_microbatches) {
    check(plan);
    require_shares(plan, num_replicas, num_microbatches);
    const auto count = static_cast<int>(num_microbatches);
    Blocks blocks(num_replicas, count);
    for (int block = 0; block < num_replicas; ++block) {
        for (std::size_t device = 0; device < plan.rows().size(); ++device) {
            blocks.add(plan.rows()[device], plan.overlaps()[device],
                       static_cast<std::uint32_t>(block));
        }
    }
    return checked({in_blocks(plan.placement(), num_replicas), count, std::move(blocks.rows),
                    plan.num_slices(), std::move(blocks.overlaps)});
}

}  // namespace pykern
