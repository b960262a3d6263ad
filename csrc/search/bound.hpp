// Bound: makespans that no order of a problem can beat.
#pragma once

#include "search/problem.hpp"

namespace pykern {

// The largest of the proven bounds, for these costs and this cap.
Ticks lower_bound(const Problem& problem);

}  // namespace pykern
