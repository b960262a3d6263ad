// Simulate: what a plan would take, without running it.
#pragma once

#include "plan/costs.hpp"
#include "plan/plan.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// Every device runs its row in order, each action as soon as the one before it and its inputs are
// done; a transfer blocks no device. Throws PlanError for a plan that cannot run,
// std::invalid_argument for costs of other stages or devices.
Timeline simulate(const Plan& plan, const Costs& costs);

}  // namespace pykern
