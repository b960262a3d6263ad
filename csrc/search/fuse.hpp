// Fuse: makes I and W of a microbatch one B again where nothing is lost.
#pragma once

#include <cstddef>
#include <cstdint>

#include "search/schedule.hpp"

namespace pykern {

// Edits one row of the schedule and tries it: the I and the W of a microbatch, at these positions,
// become a B where the first of them is. Not where a W of another microbatch of the stage stands
// between them, since gradients add up in ascending order.
bool try_fuse(Schedule& schedule, std::size_t device, std::size_t input, std::size_t weight,
              Ticks limit);

// Fuses every pair that leaves the makespan as it is, until `work` actions have been timed.
void fuse_all(Schedule& schedule, std::int64_t work);

// The order with every B split into I and W, one behind the other.
Order split_all(const Order& order);

// The order with every I and its W as a B in place of the I, on the stages that may not split. It
// is no slower, because there an I takes what a B takes.
Order merge_unknown(const Problem& problem, const Order& order);

}  // namespace pykern
