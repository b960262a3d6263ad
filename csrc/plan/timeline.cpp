#include "plan/timeline.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace pykern {

Timeline::Timeline(std::vector<std::vector<Span>> rows) : rows_(std::move(rows)) {}

double Timeline::makespan_ns() const {
    double first = std::numeric_limits<double>::infinity();
    double last = -std::numeric_limits<double>::infinity();
    for (const auto& row : rows_) {
        for (const Span& span : row) {
            first = std::min(first, span.start_ns);
            last = std::max(last, span.end_ns);
        }
    }
    return last > first ? last - first : 0;
}

double Timeline::busy_ns(int device) const {
    double busy = 0;
    for (const Span& span : rows_.at(static_cast<std::size_t>(device))) {
        busy += span.end_ns - span.start_ns;
    }
    return busy;
}

double Timeline::bubble_ratio() const {
    const double available = makespan_ns() * num_devices();
    if (available <= 0) return 0;
    double busy = 0;
    for (int device = 0; device < num_devices(); ++device) busy += busy_ns(device);
    return 1 - busy / available;
}

int Timeline::peak_in_flight(int device) const {
    int held = 0;
    int peak = 0;
    for (const Span& span : rows_.at(static_cast<std::size_t>(device))) {
        if (span.action.kind == Kind::F) peak = std::max(peak, ++held);
        if (span.action.kind == Kind::B) --held;
    }
    return peak;
}

}  // namespace pykern
