#include "plan/lower.hpp"

#include <cstddef>
#include <utility>

#include "plan/check.hpp"
#include "plan/ring_uses.hpp"

namespace pykern {

LoweredPlan lower(const Plan& plan) {
    check(plan);
    const Index index(plan);
    const RingUses uses(plan, index);
    CellSlots slots(plan);
    std::vector<FreeSlots> rings(plan.placement().replicas().size() *
                                 static_cast<std::size_t>(plan.num_stages()));
    std::vector<Lane> lanes;
    for (std::size_t number = 0; number < uses.links().all().size(); ++number) {
        lanes.push_back({uses.links().all()[number], {}});
        Lane& lane = lanes.back();
        const Row& receiver = plan.rows()[static_cast<std::size_t>(lane.link.to)];
        lane.copies.reserve(uses.of(number).size());
        for (const RingUse& use : uses.of(number)) {
            lane.copies.push_back({.action = use.copy, .slot = CellSlots::kNone, .freed_by = {}});
            if (use.copy.kind == Kind::COPY_B) continue;
            const Action reader = reader_of(use.copy, index);
            const int replica = plan.placement().replica_of(reader.microbatch);
            const std::size_t ring =
                static_cast<std::size_t>(replica) * static_cast<std::size_t>(plan.num_stages()) +
                reader.stage;
            const FreeSlots::Taken taken = rings[ring].take(use.from, use.to);
            Copy& copy = lane.copies.back();
            copy.slot = taken.slot;
            if (taken.freed_at != FreeSlots::kNeverUsed) copy.freed_by = receiver[taken.freed_at];
            slots.give(reader, taken.slot);
        }
    }
    slots.give_to_rest(plan, index);
    for (Lane& lane : lanes) {
        for (Copy& copy : lane.copies) {
            if (copy.slot == CellSlots::kNone) copy.slot = slots.of(reader_of(copy.action, index));
        }
    }
    return {plan, std::move(lanes)};
}

CellSlots slots_of(const LoweredPlan& lowered) {
    const Index index(lowered.plan);
    CellSlots slots(lowered.plan);
    for (const Lane& lane : lowered.lanes) {
        for (const Copy& copy : lane.copies) {
            if (copy.action.kind == Kind::COPY_F) {
                slots.give(reader_of(copy.action, index), copy.slot);
            }
        }
    }
    slots.give_to_rest(lowered.plan, index);
    return slots;
}

std::vector<Ring> rings_of(const LoweredPlan& lowered) {
    const Placement& placement = lowered.plan.placement();
    const CellSlots slots = slots_of(lowered);
    std::vector<Ring> rings;
    for (int replica = 0; replica < placement.num_replicas(); ++replica) {
        for (int stage = 0; stage < placement.num_stages(); ++stage) {
            rings.push_back({.stage = stage,
                             .replica = replica,
                             .device = placement.device_of(stage, replica),
                             .num_slots = slots.num_slots(replica, stage)});
        }
    }
    return rings;
}

}  // namespace pykern
