// Extend: an order of few microbatches made one of many, by repeating its steady part.
#pragma once

#include <cstddef>
#include <vector>

#include "search/schedule.hpp"

namespace pykern {

// The loaded schedule's order with `extra` more microbatches: every row is cut where it holds
// `period` microbatches of everything, near `moment`, and that part is repeated. `extra` must be a
// multiple of `period`. An order without rows where some row has no such part. The result holds
// every action once but may deadlock or break the cap: the caller evaluates it.
Order extend(const Schedule& schedule, std::size_t extra, std::size_t period, Ticks moment);

}  // namespace pykern
