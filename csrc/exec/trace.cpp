#include "exec/trace.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace pykern {

std::int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Trace::begin() { std::fill_n(slot(), num_actions_, Entry{}); }

Timeline Trace::timeline(const Program& program, std::size_t ago) const {
    if (ago >= size()) {
        throw std::out_of_range("ago must be below " + std::to_string(size()) +
                                ", the number of traced steps, got " + std::to_string(ago));
    }
    const std::size_t step = num_ended_.load(std::memory_order_acquire) - 1 - ago;
    const Entry* entries = ring_.data() + slot_begin(step);
    std::int64_t origin = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < num_actions_; ++i) {
        if (entries[i].end_ns != 0) origin = std::min(origin, entries[i].start_ns);
    }
    std::vector<std::vector<Span>> rows(static_cast<std::size_t>(program.num_devices()));
    for (Position position = 0; position < num_actions_; ++position) {
        const Entry& entry = entries[position];
        if (entry.end_ns == 0) continue;
        rows[static_cast<std::size_t>(program.device_of(position))].push_back(
            {program.action(position), static_cast<double>(entry.start_ns - origin),
             static_cast<double>(entry.end_ns - origin)});
    }
    return Timeline(std::move(rows));
}

}  // namespace pykern
