#include "plan/timeline.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/text.hpp"

namespace pykern {

namespace {

void require_order(int device, const std::vector<Span>& row) {
    double previous = -std::numeric_limits<double>::infinity();
    for (const Span& span : row) {
        const bool finite = std::isfinite(span.start_ns) && std::isfinite(span.end_ns);
        if (!finite || span.end_ns < span.start_ns || span.start_ns < previous) {
            throw std::invalid_argument(
                "device " + std::to_string(device) + ": " + to_text(span.action) + " runs from " +
                std::to_string(span.start_ns) + " to " + std::to_string(span.end_ns) +
                " ns, but times must be finite, ends not before starts, starts ascending");
        }
        previous = span.start_ns;
    }
}

}  // namespace

Timeline::Timeline(std::vector<std::vector<Span>> rows) : rows_(std::move(rows)) {
    for (int device = 0; device < num_devices(); ++device) {
        require_order(device, rows_[static_cast<std::size_t>(device)]);
    }
}

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
    return std::max(0.0, 1 - busy / available);  // the sum may round past the product
}

int Timeline::peak_in_flight(int device) const {
    int held = 0;
    int peak = 0;
    for (const Span& span : rows_.at(static_cast<std::size_t>(device))) {
        if (span.action.kind == Kind::F) peak = std::max(peak, ++held);
        if (span.action.kind == Kind::B || span.action.kind == Kind::W) --held;
    }
    return peak;
}

}  // namespace pykern
