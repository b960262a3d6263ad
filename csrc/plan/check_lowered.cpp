#include "plan/check_lowered.hpp"

#include <cstddef>
#include <string>
#include <vector>

#include "plan/check.hpp"
#include "plan/ring_uses.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

std::string name_of(Link link) {
    return "the lane from device " + std::to_string(link.from) + " to " + std::to_string(link.to);
}

void require_lanes(const LoweredPlan& lowered, const RingUses& uses) {
    const std::vector<Link>& links = uses.links().all();
    for (std::size_t number = 0; number < links.size(); ++number) {
        const Link link = links[number];
        const auto refuse = [&](const std::string& what) {
            throw PlanError(kComplete, lowered.plan, link.from, 0, what);
        };
        if (number >= lowered.lanes.size() || lowered.lanes[number].link != link) {
            refuse(name_of(link) + " is missing, or not in its place");
        }
        const std::vector<Copy>& copies = lowered.lanes[number].copies;
        const std::vector<RingUse>& expected = uses.of(number);
        for (std::size_t i = 0; i < expected.size(); ++i) {
            if (i < copies.size() && copies[i].action == expected[i].copy) continue;
            refuse(name_of(link) + " holds " +
                   (i < copies.size() ? to_text(copies[i].action) : "nothing") + " where " +
                   to_text(expected[i].copy) + " belongs");
        }
        if (copies.size() > expected.size()) {
            refuse(name_of(link) + " goes on after its last copy with " +
                   to_text(copies[expected.size()].action));
        }
    }
    if (lowered.lanes.size() <= links.size()) return;
    const Link extra = lowered.lanes[links.size()].link;
    throw PlanError(kComplete, lowered.plan, 0, 0, name_of(extra) + " has nothing to carry");
}

// The last use of each slot of one ring, as the position behind the action that frees it.
class RingCheck {
   public:
    RingCheck(const LoweredPlan& lowered, const Index& index) : lowered_(lowered), index_(index) {}

    void take(const Copy& copy, const RingUse& use, int device) {
        const auto refuse = [&](std::size_t position, const std::string& what) {
            throw PlanError(kSlots, lowered_.plan, device, position,
                            to_text(copy.action) + " takes slot " + std::to_string(copy.slot) +
                                " of its ring, " + what);
        };
        if (copy.slot < 0 || copy.slot > static_cast<int>(free_at_.size())) {
            refuse(use.from, "but slots are numbered without a gap from 0, and it has taken " +
                                 std::to_string(free_at_.size()) + " so far");
        }
        const auto slot = static_cast<std::size_t>(copy.slot);
        if (slot == free_at_.size()) free_at_.push_back(0);
        const std::size_t waited_to = copy.freed_by ? end_of(*copy.freed_by, device, refuse) : 0;
        if (waited_to < free_at_[slot]) {
            refuse(free_at_[slot] - 1, "which this action frees, and does not wait for it");
        }
        if (waited_to > use.from) {
            refuse(waited_to - 1, "and waits for this action, but may be needed from position " +
                                      std::to_string(use.from) + " on");
        }
        free_at_[slot] = use.to + 1;
    }

   private:
    template <class Refuse>
    std::size_t end_of(Action action, int device, Refuse refuse) const {
        const Plan& plan = lowered_.plan;
        const bool in_plan =
            action.stage < plan.num_stages() &&
            action.microbatch < static_cast<std::size_t>(plan.num_microbatches()) &&
            action.slice < plan.num_slices();
        const int stands = in_plan ? index_.at(action) : -1;
        if (stands < index_.row_start(device) || stands >= index_.row_start(device + 1)) {
            refuse(0, "and waits for " + to_text(action) + ", which this device does not run");
        }
        return static_cast<std::size_t>(stands - index_.row_start(device)) + 1;
    }

    const LoweredPlan& lowered_;
    const Index& index_;
    std::vector<std::size_t> free_at_;
};

// A gradient lands where its cell is, which needs no wait.
void require_cell(const LoweredPlan& lowered, const Copy& copy, int slot, int device) {
    if (copy.slot == slot && !copy.freed_by) return;
    throw PlanError(kSlots, lowered.plan, device, 0,
                    to_text(copy.action) + " goes to slot " + std::to_string(slot) +
                        ", where its microbatch is, and waits for no slot");
}

}  // namespace

void check(const LoweredPlan& lowered) {
    check(lowered.plan);
    const Index index(lowered.plan);
    const RingUses uses(lowered.plan, index);
    require_lanes(lowered, uses);
    const Placement& placement = lowered.plan.placement();
    const auto num_stages = static_cast<std::size_t>(placement.num_stages());
    std::vector<RingCheck> rings(placement.replicas().size() * num_stages,
                                 RingCheck(lowered, index));
    const auto for_each_copy = [&](Kind kind, auto visit) {
        for (std::size_t number = 0; number < lowered.lanes.size(); ++number) {
            const Lane& lane = lowered.lanes[number];
            for (std::size_t i = 0; i < lane.copies.size(); ++i) {
                if (lane.copies[i].action.kind != kind) continue;
                visit(lane.copies[i], uses.of(number)[i], lane.link.to);
            }
        }
    };
    for_each_copy(Kind::COPY_F, [&](const Copy& copy, const RingUse& use, int device) {
        const auto replica = static_cast<std::size_t>(placement.replica_of(copy.action.microbatch));
        rings[replica * num_stages + copy.action.stage].take(copy, use, device);
    });
    const CellSlots slots = slots_of(lowered);
    for_each_copy(Kind::COPY_B, [&](const Copy& copy, const RingUse&, int device) {
        require_cell(lowered, copy, slots.of(reader_of(copy.action, index)), device);
    });
}

}  // namespace pykern
