// Replicate: the same plan on several blocks of devices, each with its share of the microbatches.
#pragma once

#include <cstdint>

#include "plan/plan.hpp"

namespace pykern {

// The plan `num_replicas` times side by side. Block b has as many devices as the plan, from
// b * plan.num_devices() on, and of `num_microbatches` those with m mod num_replicas == b. The plan
// is for as many as block 0 has; a block with one fewer leaves out the last. No makespan is longer
// than the plan's.
//
// A plan of K replicas gives K * num_replicas: first the blocks' first ones, then their second
// ones, so that microbatches are dealt to all of them in turn.
//
// Throws PlanError for a plan that cannot run, std::invalid_argument for counts that do not fit,
// and for a plan with REDUCE or U, which would stand once in every block.
Plan with_replicas(const Plan& plan, int num_replicas, std::int64_t num_microbatches);

}  // namespace pykern
