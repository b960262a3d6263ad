// Recompute: where a plan rebuilds what its forwards have not kept.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "plan/action.hpp"
#include "plan/costs.hpp"
#include "plan/memory.hpp"
#include "plan/plan.hpp"

namespace pykern {

// The plan with these R in it. All else stays in the order in which it is.
//
// An R stands as early as its device would otherwise wait, for an input or for others in the
// cool-down, and no later than right before its B or I. Where nothing waits for long enough it can
// do better to put it where the device waits for less: of the plan that fills only waits that are
// as long as an R and the one that fills all, the result is the one with the shorter makespan, the
// first where they are equal. It never takes longer than with every R right before its B or I.
//
// With `memory`, no R is so early that because of it the device holds more than `cap_bytes`
// anywhere between there and its B or I. One right before its B or I is as late as it can be and
// stands there whatever the cap: `check_memory` tells.
//
// Without `memory` every cell counts the same, and as few are held on a device at once as let the
// step end as early as without a cap.
//
// A cell whose B or I follows its F at once gets none: nothing would be free in between.
//
// Throws PlanError for a plan that cannot run. Throws std::invalid_argument for cells that are not
// an R of the plan, stand twice or are in it already, and for a plan without backwards or in
// slices.
Plan with_recompute(const Plan& plan, const std::vector<Action>& cells, const Costs& costs,
                    const std::optional<Memory>& memory = {},
                    double cap_bytes = std::numeric_limits<double>::infinity());

}  // namespace pykern
