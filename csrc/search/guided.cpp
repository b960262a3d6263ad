#include "search/guided.hpp"

#include <algorithm>

namespace pykern {

namespace {

// Farther ahead there is hardly ever an action whose input has arrived.
constexpr std::size_t kLookAhead = 24;

}  // namespace

Guided::Guided(Devices& devices)
    : devices_(devices),
      rows_(devices.problem().num_devices),
      passed_(devices.problem().time.size()) {
    const Problem& problem = devices.problem();
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        rows_[device].reserve(3 * problem.stages[device].size() * problem.num_microbatches + 1);
    }
}

std::optional<Order> Guided::run(const Order& plan) {
    for (std::size_t device = 0; device < rows_.size(); ++device) {
        std::vector<Link>& row = rows_[device];
        row.clear();
        row.push_back({0, 1});
        for (const Symbol symbol : plan.rows[device]) {
            row.push_back({symbol, static_cast<std::uint32_t>(row.size() + 1)});
        }
        row.back().next = 0;
    }
    return devices_.run(*this);
}

// When the next planned action can start, at the earliest.
Ticks Guided::next_start(Symbol symbol, Ticks now) const {
    const Ticks known = devices_.arrival(symbol);
    if (known != kNever) return known;
    const Problem& problem = devices_.problem();
    const std::size_t stage = stage_of(symbol);
    if (op_of(symbol) == kForward && stage > 0) {
        return now + problem.hop[stage - 1] + problem.time[symbol_of(stage - 1, kForward)];
    }
    if (is_backward(symbol) && stage + 1 < problem.num_stages) {
        return now + problem.hop[stage] + problem.time[symbol_of(stage + 1, kInput)];
    }
    return kNever;
}

Symbol Guided::take(std::size_t device, std::uint32_t before) {
    std::vector<Link>& row = rows_[device];
    const Link& taken = row[row[before].next];
    row[before].next = taken.next;
    return taken.symbol;
}

std::optional<Symbol> Guided::pick(std::size_t device, Ticks now) {
    const Problem& problem = devices_.problem();
    const std::vector<Link>& row = rows_[device];
    std::uint32_t before = 0;
    if (row[before].next == 0) return std::nullopt;
    const Symbol head = row[row[before].next].symbol;
    if (devices_.arrival(head) <= now) return take(device, before);
    const Ticks deadline = next_start(head, now);
    Ticks held = devices_.held(device);
    Ticks peak = held;
    std::ranges::fill(passed_, 0);
    for (std::size_t i = 0; i < kLookAhead && row[before].next != 0; ++i) {
        const Symbol symbol = row[row[before].next].symbol;
        const std::size_t stage = stage_of(symbol);
        const Symbol queue = is_backward(symbol) ? symbol_of(stage, kInput) : symbol;
        const Ticks takes = problem.takes[symbol];
        const bool fits = takes <= 0 || peak + takes <= problem.cap[device];
        if (passed_[queue] == 0 && fits && devices_.arrival(symbol) <= now &&
            now + problem.time[symbol] <= deadline) {
            return take(device, before);
        }
        passed_[queue] = 1;
        held += takes;
        peak = std::max(peak, held);
        before = row[before].next;
    }
    return std::nullopt;
}

}  // namespace pykern
