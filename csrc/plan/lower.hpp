// Lower: the copies between devices, which follow from a plan and are never authored.
#pragma once

#include <optional>
#include <vector>

#include "plan/action.hpp"
#include "plan/cell_slots.hpp"
#include "plan/links.hpp"
#include "plan/plan.hpp"

namespace pykern {

// COPY_F(s, m) brings what F(s, m) made to the device of stage s + 1, COPY_B(s, m) what B or I made
// to the device of stage s - 1. Both land in the slot of the receiving cell (cell_slots.hpp).
struct Copy {
    Action action;
    int slot = 0;
    // An action of the receiver: the copy may not start before it has ended. None where the slot
    // was free from the beginning, and for COPY_B, whose cell has the slot already.
    std::optional<Action> freed_by;

    friend bool operator==(const Copy&, const Copy&) = default;
};

// The copies over one link, which run one after the other: in the order in which the sender's row
// makes what they carry.
struct Lane {
    Link link;
    std::vector<Copy> copies;

    friend bool operator==(const Lane&, const Lane&) = default;
};

struct Ring {
    int stage;
    int replica;
    int device;  // where it is
    int num_slots;

    friend bool operator==(const Ring&, const Ring&) = default;
};

struct LoweredPlan {
    Plan plan;
    std::vector<Lane> lanes;

    friend bool operator==(const LoweredPlan&, const LoweredPlan&) = default;
};

// A lane for every link that the plan uses, by sender and receiver, with as few slots as let every
// copy start one slot of the receiver's row ahead of its reader. Throws PlanError for a plan that
// cannot run.
LoweredPlan lower(const Plan& plan);

// The slots of a lowered plan that has passed `check`, and how many of them each stage has, replica
// after replica.
CellSlots slots_of(const LoweredPlan& lowered);
std::vector<Ring> rings_of(const LoweredPlan& lowered);

}  // namespace pykern
