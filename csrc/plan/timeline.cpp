#include "plan/timeline.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
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
                "times must be finite, ends not before starts, starts ascending, got " +
                std::to_string(span.start_ns) + " to " + std::to_string(span.end_ns) + " ns for " +
                to_text(span.action) + " on device " + std::to_string(device));
        }
        previous = span.start_ns;
    }
}

// Starts ascend, ends need not: two actions may run side by side.
double last_end_ns(const std::vector<Span>& row) {
    return std::ranges::max_element(row, {}, &Span::end_ns)->end_ns;
}

}  // namespace

Timeline::Timeline(std::vector<std::vector<Span>> rows) : rows_(std::move(rows)) {
    for (int device = 0; device < num_devices(); ++device) {
        require_order(device, rows_[static_cast<std::size_t>(device)]);
    }
}

double Timeline::first_start_ns() const {
    double first = std::numeric_limits<double>::infinity();
    for (const auto& row : rows_) {
        if (!row.empty()) first = std::min(first, row.front().start_ns);
    }
    return std::isfinite(first) ? first : 0;
}

double Timeline::makespan_ns() const {
    double last = -std::numeric_limits<double>::infinity();
    for (const auto& row : rows_) {
        if (!row.empty()) last = std::max(last, last_end_ns(row));
    }
    return std::max(0.0, last - first_start_ns());
}

double Timeline::span_ns() const {
    double longest = 0;
    for (const auto& row : rows_) {
        if (!row.empty()) longest = std::max(longest, last_end_ns(row) - row.front().start_ns);
    }
    return longest;
}

double Timeline::busy_ns(int device) const {
    double busy = 0;
    double counted_to = -std::numeric_limits<double>::infinity();
    for (const Span& span : rows_.at(static_cast<std::size_t>(device))) {
        busy += std::max(0.0, span.end_ns - std::max(span.start_ns, counted_to));
        counted_to = std::max(counted_to, span.end_ns);
    }
    return busy;
}

double Timeline::idle_share(double total_ns) const {
    const double available = total_ns * num_devices();
    if (available <= 0) return 0;
    double busy = 0;
    for (int device = 0; device < num_devices(); ++device) busy += busy_ns(device);
    return std::max(0.0, 1 - busy / available);  // the sum may round past the product
}

double Timeline::bubble_ratio() const { return idle_share(makespan_ns()); }

double Timeline::span_bubble_ratio() const { return idle_share(span_ns()); }

int Timeline::peak_in_flight(int device) const {
    const std::vector<Span>& row = rows_.at(static_cast<std::size_t>(device));
    std::map<Action, const Span*> last;  // by the F of each cell
    for (const Span& span : row) {
        const Kind kind = span.action.kind;
        if (kind == Kind::F || kind == Kind::B || kind == Kind::I || kind == Kind::W) {
            last[with_kind(span.action, Kind::F)] = &span;
        }
    }
    int held = 0;
    int peak = 0;
    for (const Span& span : row) {
        if (span.action.kind == Kind::F) peak = std::max(peak, ++held);
        const auto found = last.find(with_kind(span.action, Kind::F));
        if (found != last.end() && found->second == &span) --held;
    }
    return peak;
}

}  // namespace pykern
