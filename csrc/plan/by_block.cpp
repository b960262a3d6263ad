#include "plan/by_block.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/check.hpp"
#include "plan/require.hpp"
#include "plan/slot_lane.hpp"

namespace pykern {

namespace {

class Block {
   public:
    Block(const Placement& placement, int num_microbatches, std::size_t num_slots)
        : placement_(placement),
          num_microbatches_(static_cast<std::size_t>(num_microbatches)),
          num_slots_(num_slots),
          lanes_(static_cast<std::size_t>(placement.num_devices()), SlotLane(num_slots)),
          forward_(static_cast<std::size_t>(placement.num_stages()) * num_microbatches_),
          input_(forward_.size()) {}

    void put(Kind kind, const std::vector<int>& slots, int interval) {
        for (int stage = 0; stage < placement_.num_stages(); ++stage) {
            const int device = placement_.device_of(stage);
            auto slot = static_cast<std::size_t>(slots[static_cast<std::size_t>(stage)]);
            for (std::size_t m = 0; m < num_microbatches_; ++m) {
                SlotLane& lane = lanes_[static_cast<std::size_t>(device)];
                if (!lane.is_free(slot)) {
                    throw std::invalid_argument(
                        "the block must have one action in each slot, got two in slot " +
                        std::to_string(slot) + " of device " + std::to_string(device));
                }
                lane.put(slot, make_action(kind, stage, static_cast<std::int64_t>(m)));
                slot_of(kind, stage, m) = slot;
                slot += static_cast<std::size_t>(interval);
            }
        }
    }

    // Within the steady part, up to a device's last F, actions move into idle slots alone.
    void squeeze(bool steady) {
        for (SlotLane& lane : lanes_) {
            lane.settle();
            peak_ = std::max(peak_, lane.peak());
        }
        for (std::size_t slot = 0; slot < num_slots_; ++slot) {
            for (SlotLane& lane : lanes_) {
                if (!lane.is_free(slot)) advance(lane, slot, steady && lane.goes_on(slot));
            }
        }
    }

    std::vector<Row> rows() const {
        std::vector<Row> rows;
        rows.reserve(lanes_.size());
        for (const SlotLane& lane : lanes_) rows.push_back(lane.row());
        return rows;
    }

   private:
    std::size_t& slot_of(Kind kind, int stage, std::size_t microbatch) {
        std::vector<std::size_t>& slots = kind == Kind::F ? forward_ : input_;
        return slots[static_cast<std::size_t>(stage) * num_microbatches_ + microbatch];
    }

    void advance(SlotLane& lane, std::size_t slot, bool into_idle) {
        const Action action = lane.at(slot);
        for (std::size_t to = earliest(action); to < slot; ++to) {
            if (!(into_idle ? lane.is_idle(to) : lane.is_free(to))) continue;
            if (!lane.move(slot, to, peak_)) continue;
            slot_of(action.kind, action.stage, action.microbatch) = to;
            return;
        }
    }

    // The slot behind all inputs and behind the stage's last microbatch.
    std::size_t earliest(Action action) {
        const auto [microbatch, stage, kind, slice] = action;
        const bool forward = kind == Kind::F;
        const int source = forward ? stage - 1 : stage + 1;
        std::size_t slot = forward ? 0 : slot_of(Kind::F, stage, microbatch) + 1;
        if (source >= 0 && source < placement_.num_stages()) {
            slot = std::max(slot, slot_of(kind, source, microbatch) + 1);
        }
        if (microbatch > 0) slot = std::max(slot, slot_of(kind, stage, microbatch - 1) + 1);
        return slot;
    }

    const Placement& placement_;
    std::size_t num_microbatches_;
    std::size_t num_slots_;
    std::vector<SlotLane> lanes_;
    // By stage and microbatch.
    std::vector<std::size_t> forward_;
    std::vector<std::size_t> input_;
    int peak_ = 0;
};

void require_slots(const char* name, const std::vector<int>& slots, const Placement& placement) {
    require_range(name, static_cast<std::int64_t>(slots.size()), placement.num_stages(),
                  placement.num_stages());
    for (const int slot : slots) require_range("slot", slot, 0, kMaxCells);
}

}  // namespace

Plan by_block(const Placement& placement, int num_microbatches,
              const std::vector<int>& forward_slots, const std::vector<int>& input_slots,
              int interval, bool steady) {
    require_plan_size(placement.num_stages(), num_microbatches);
    require_slots("number of forward_slots", forward_slots, placement);
    require_slots("number of input_slots", input_slots, placement);
    require_range("interval", interval, 1, kMaxStages);
    const std::int64_t last =
        std::max(std::ranges::max(forward_slots), std::ranges::max(input_slots));
    const std::int64_t num_slots = last + std::int64_t{interval} * (num_microbatches - 1) + 1;
    // A slot for each F, I and W, and as many to spare; it bounds the memory.
    require_range("slots of all devices", num_slots * placement.num_devices(), 1,
                  6 * std::int64_t{kMaxCells});
    Block block(placement, num_microbatches, static_cast<std::size_t>(num_slots));
    block.put(Kind::F, forward_slots, interval);
    block.put(Kind::I, input_slots, interval);
    block.squeeze(steady);
    return checked({placement, num_microbatches, block.rows()});
}

}  // namespace pykern
