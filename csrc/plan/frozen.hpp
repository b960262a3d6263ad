// Frozen: plans for models of which some stages have nothing to train.
#pragma once

#include <vector>

#include "plan/plan.hpp"

namespace pykern {

// The plan with these stages frozen. Those in front of the first stage that trains keep their
// forwards alone: no gradient is needed there. Each other one hands gradients on, which one B does
// without a W. Throws std::invalid_argument where a stage is not in the plan, or none is left to
// train, and PlanError where the plan cannot run.
Plan with_frozen(const Plan& plan, const std::vector<int>& stages);

}  // namespace pykern
