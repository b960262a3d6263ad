// Block: a plan that repeats the timetable of one microbatch.
#pragma once

#include <vector>

#include "plan/placement.hpp"
#include "plan/plan.hpp"

namespace pykern {

// The timetable of one microbatch, in slots that take any action: where each stage computes F and
// where I. It is repeated for every microbatch, `interval` slots later each time; no device may be
// asked for two actions in one slot. W takes the free slots, oldest first. Then the actions, in the
// order of their slots, each move to the first free slot behind their inputs that leaves the
// plan's peak in flight, F to W, as it was: that shortens the warm-up and the cool-down. `steady`
// keeps W in their slots up to the device's last F: until then an action moves only where the
// device would idle, so that the period stays the block's, whatever an action takes.
Plan by_block(const Placement& placement, int num_microbatches,
              const std::vector<int>& forward_slots, const std::vector<int>& input_slots,
              int interval, bool steady = false);

}  // namespace pykern
