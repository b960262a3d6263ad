// Updates: where a plan updates its weights, and how many versions of them it then holds.
#pragma once

#include <vector>

#include "plan/plan.hpp"

namespace pykern {

// The plan with a U, numbered by its last microbatch, for each `group` microbatches of a stage in
// turn, the last group perhaps shorter. With no delay it stands right behind the group's last
// backward; else right before the stage's first forward of the group `delay` groups later, or at
// the end of the row. A forward reads the newest weights, so this decides which ones it reads.
// Throws PlanError where the forward of a later group stands before the backwards of this one.
Plan with_updates(const Plan& plan, int group, int delay);

// Most versions of its weights that each stage holds at once: the newest, and those that the
// forwards of microbatches in flight have read, for their backwards. The plan must have passed
// `check`.
std::vector<int> weight_versions(const Plan& plan);

}  // namespace pykern
