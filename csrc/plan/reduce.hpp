// Reduce: where the gradients of several replicas become one. Derived from a plan or authored.
#pragma once

#include "plan/plan.hpp"

namespace pykern {

// The plan with one REDUCE for each stage, on the stage's device in replica 0, where it has several
// replicas or `over_peers` is true, a backward, and no REDUCE yet. It stands behind everything that
// its device starts before the stage's last gradient is there, in a timetable of one slot for F, R,
// I and W and two for B. An order by time has no circle, so the plan stays free of deadlock. Throws
// PlanError for a plan that cannot run.
Plan with_reductions(const Plan& plan, bool over_peers = false);

}  // namespace pykern
