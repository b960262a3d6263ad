// Visible: what is seen of a row of a timeline when time is cut into columns.
#pragma once

#include <vector>

#include "plan/timeline.hpp"

namespace pykern {

// The spans of a row that are seen where each is drawn over those before it, `columns_per_ns`
// columns for a nanosecond from `origin_ns` on: of those shorter than a column that start in the
// same one, the last. So there are at most a few for each column, however long the row is.
std::vector<Span> visible(const std::vector<Span>& row, double origin_ns, double columns_per_ns);

}  // namespace pykern
