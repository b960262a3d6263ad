// By list: list scheduling, which starts what can start instead of following one fixed order.
#pragma once

#include "plan/plan.hpp"

namespace pykern {

// The plan with the rows that this rule gives in unit time: every device keeps the plan's forwards,
// its B and I, and its W as three queues. In each slot a device starts the first forward if its
// inputs have ended and fewer than `cap` are in flight there; else the first B or I if that can
// start, else the first W. In flight is each F of the device until its B or W; overlaps are
// dropped. Throws std::invalid_argument where the cap stops all devices; the plan's own peak may be
// too small a cap, since forwards run earlier here.
Plan by_list(const Plan& plan, int cap);

}  // namespace pykern
