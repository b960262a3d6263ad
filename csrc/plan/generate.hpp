// Generate: the two rules that make the rows of most published schedules.
#pragma once

#include <vector>

#include "plan/placement.hpp"
#include "plan/plan.hpp"

namespace pykern {

// The lattice. F at stage s has place s on its microbatch's chain, B has place 2S-1-s. The
// microbatches of a replica enter in units of `unit`, a group of `group` units after the other:
// unit n is offset by 2 (n mod group) + group_offset (n div group). With K slices the units of a
// group are 2K apart; slice j of a forward is 2j later than the first, and the slices of a backward
// run the other way round. Each device runs its actions in ascending place + offset, the
// microbatches of a unit back to back. Every input has a smaller slot, so no choice deadlocks.
Plan by_slots(const Placement& placement, int num_microbatches, int group, int group_offset,
              int unit = 1, int num_slices = 1);

// Warm-up, steady, cool-down: device d runs warmup[d] forwards, then F and B in turn, then the
// remaining backwards. The microbatches are cut into groups of near-equal size, `group` at most;
// within a group the forward queue goes chunk by chunk, the backward queue the same way with the
// chunks reversed. With a weight delay for each device every B becomes an I, and its W follows
// right behind the I that many backwards later. Throws PlanError where a warm-up is too short for
// the plan to run.
Plan by_phases(const Placement& placement, int num_microbatches, const std::vector<int>& warmup,
               int group, const std::vector<int>& weight_delay = {});

}  // namespace pykern
