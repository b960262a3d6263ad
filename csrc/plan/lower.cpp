#include "plan/lower.hpp"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>

#include "plan/check.hpp"
#include "plan/ring_uses.hpp"

namespace pykern {

namespace {

// A slot, and the position of the action that frees it.
struct Taken {
    std::size_t to;
    int slot;

    friend auto operator<=>(const Taken&, const Taken&) = default;
};

// Gives out the slots of one ring. Uses come in ascending order of `from`, and always taking the
// slot that was freed first then needs as few as are in use at once.
class Slots {
   public:
    Copy take(const RingUse& use, const Row& receiver) {
        Copy copy{.action = use.copy, .slot = num_slots_, .freed_by = {}};
        if (!taken_.empty() && taken_.top().to < use.from) {
            copy.slot = taken_.top().slot;
            copy.freed_by = receiver[taken_.top().to];
            taken_.pop();
        } else {
            ++num_slots_;
        }
        taken_.push({use.to, copy.slot});
        return copy;
    }

   private:
    int num_slots_ = 0;
    std::priority_queue<Taken, std::vector<Taken>, std::greater<>> taken_;
};

}  // namespace

LoweredPlan lower(const Plan& plan) {
    check(plan);
    const RingUses uses(plan, Index(plan));
    std::vector<Slots> slots(num_rings(plan.placement()));
    std::vector<Lane> lanes;
    for (std::size_t number = 0; number < uses.links().all().size(); ++number) {
        lanes.push_back({uses.links().all()[number], {}});
        Lane& lane = lanes.back();
        const Row& receiver = plan.rows()[static_cast<std::size_t>(lane.link.to)];
        lane.copies.reserve(uses.of(number).size());
        for (const RingUse& use : uses.of(number)) {
            lane.copies.push_back(slots[ring_of(plan.placement(), use.copy)].take(use, receiver));
        }
    }
    return {plan, std::move(lanes)};
}

std::vector<Ring> rings_of(const LoweredPlan& lowered) {
    const Placement& placement = lowered.plan.placement();
    std::vector<Ring> rings(num_rings(placement));
    for (const Lane& lane : lowered.lanes) {
        for (const Copy& copy : lane.copies) {
            Ring& ring = rings[ring_of(placement, copy.action)];
            ring = {.kind = copy.action.kind,
                    .stage = copy.action.stage,
                    .replica = placement.replica_of(copy.action.microbatch),
                    .device = lane.link.to,
                    .num_slots = std::max(ring.num_slots, copy.slot + 1)};
        }
    }
    std::erase_if(rings, [](const Ring& ring) { return ring.num_slots == 0; });
    return rings;
}

}  // namespace pykern
