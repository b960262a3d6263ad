#include "plan/visible.hpp"

#include <cmath>
#include <cstddef>

namespace pykern {

std::vector<Span> visible(const std::vector<Span>& row, double origin_ns, double columns_per_ns) {
    const auto column = [&](const Span& span) {
        return std::floor((span.start_ns - origin_ns) * columns_per_ns);
    };
    const auto is_short = [&](const Span& span) {
        return (span.end_ns - span.start_ns) * columns_per_ns < 1;
    };
    std::vector<Span> seen;
    for (std::size_t i = 0; i < row.size(); ++i) {
        const bool covered = i + 1 < row.size() && is_short(row[i]) && is_short(row[i + 1]) &&
                             column(row[i]) == column(row[i + 1]);
        // The second of a pair stands beside the first, not where it starts.
        const bool paired =
            i > 0 && row[i - 1].start_ns == row[i].start_ns && !is_short(row[i - 1]);
        if (!covered || paired) seen.push_back(row[i]);
    }
    return seen;
}

}  // namespace pykern
