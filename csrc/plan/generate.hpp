// Generate: the two rules that make the rows of most published schedules.
#pragma once

#include <vector>

#include "plan/placement.hpp"
#include "plan/plan.hpp"

namespace pykern {

// The lattice: F at stage s has place s on its microbatch's chain, B has place 2S-1-s, and
// microbatch m is offset by 2 (m mod group) + group_offset (m div group). Each device runs its
// actions in ascending place + offset. Every input has a smaller slot, so no choice deadlocks.
Plan by_slots(const Placement& placement, int num_microbatches, int group, int group_offset);

// Warm-up, steady, cool-down: device d runs warmup[d] forwards, then F and B in turn, then the
// remaining backwards. The microbatches are cut into groups of near-equal size, `group` at most;
// within a group the forward queue goes chunk by chunk, the backward queue the same way with the
// chunks reversed. With a weight delay for each device every B becomes an I, and its W follows
// right behind the I that many backwards later. Throws PlanError where a warm-up is too short for
// the plan to run.
Plan by_phases(const Placement& placement, int num_microbatches, const std::vector<int>& warmup,
               int group, const std::vector<int>& weight_delay = {});

}  // namespace pykern
