// Check lowered: the proof that the copies of a plan can run and overwrite nothing in use.
#pragma once

#include "plan/lower.hpp"

namespace pykern {

// Throws PlanError at the first rule that the plan breaks, or its copies do: P005 where the lanes
// are not those of the plan, P011 where a slot is taken before it is free.
void check(const LoweredPlan& lowered);

}  // namespace pykern
