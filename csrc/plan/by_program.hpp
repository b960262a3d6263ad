// Program: a plan whose rows are written out as short patterns, each repeated a number of times.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plan/placement.hpp"
#include "plan/plan.hpp"

namespace pykern {

// How often, and words parted by blanks, each the next action of its sort on the device:
//
//   F0, B0, I0   the next microbatch of the device's chunk 0, counted for F, and for B and I
//   W0, W        the oldest I that waits for its W: of chunk 0, or of all chunks
//   F0&B1        two actions that share a slot
//
// A word beyond the last microbatch, or a W while no I waits, stands for nothing: so one program
// serves plans that are too short for all of it.
using Phase = std::pair<int, std::string>;

// One list of phases for each device.
Plan by_program(const Placement& placement, int num_microbatches,
                const std::vector<std::vector<Phase>>& programs);

}  // namespace pykern
