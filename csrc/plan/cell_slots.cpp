#include "plan/cell_slots.hpp"

#include <algorithm>
#include <functional>

namespace pykern {

CellSlots::CellSlots(const Plan& plan)
    : placement_(plan.placement()),
      num_stages_(static_cast<std::size_t>(plan.num_stages())),
      num_microbatches_(static_cast<std::size_t>(plan.num_microbatches())),
      num_slices_(static_cast<std::size_t>(plan.num_slices())),
      slots_(num_stages_ * num_microbatches_ * num_slices_, kNone),
      num_slots_(num_stages_ * plan.placement().replicas().size(), 0) {}

void CellSlots::give(Action action, int slot) {
    slots_[cell_of(action)] = slot;
    int& num_slots = num_slots_[ring_of(placement_.replica_of(action.microbatch), action.stage)];
    num_slots = std::max(num_slots, slot + 1);
}

void CellSlots::give_to_rest(const Plan& plan, const Index& index) {
    std::vector<FreeSlots> rings(num_slots_.size());
    for (int device = 0; device < plan.num_devices(); ++device) {
        const Row& row = plan.rows()[static_cast<std::size_t>(device)];
        const Overlaps& starts = plan.overlaps()[static_cast<std::size_t>(device)];
        for (std::size_t position = 0; position < row.size(); ++position) {
            const Action action = row[position];
            if (action.kind != Kind::F || of(action) != kNone) continue;
            const int to = last_use_of(action, index) - index.row_start(device);
            FreeSlots& ring =
                rings[ring_of(placement_.replica_of(action.microbatch), action.stage)];
            give(action,
                 ring.take(slot_start(starts, position), static_cast<std::size_t>(to)).slot);
        }
    }
}

FreeSlots::Taken FreeSlots::take(std::size_t from, std::size_t to) {
    Taken taken{.slot = num_slots_, .freed_at = kNeverUsed};
    if (!uses_.empty() && uses_.front().to < from) {
        taken = {.slot = uses_.front().slot, .freed_at = uses_.front().to};
        std::ranges::pop_heap(uses_, std::greater<>());
        uses_.pop_back();
    } else {
        ++num_slots_;
    }
    uses_.push_back({to, taken.slot});
    std::ranges::push_heap(uses_, std::greater<>());
    return taken;
}

int last_use_of(Action action, const Index& index) {
    for (const Kind kind : {Kind::W, Kind::B, Kind::F}) {
        action.kind = kind;
        if (const int position = index.at(action); position >= 0) return position;
    }
    return -1;
}

}  // namespace pykern
