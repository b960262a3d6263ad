#include "search/block.hpp"

#include <algorithm>
#include <array>

#include "search/schedule.hpp"

namespace pykern {

namespace {

std::size_t num_legs(const Problem& problem) {
    return (problem.num_stages + problem.num_devices - 1) / problem.num_devices;
}

int some_quarters(Random& random) {
    constexpr std::array kLikely{0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 6, 8, 12};
    return kLikely.at(random.below(kLikely.size()));
}

int few(Random& random) {
    constexpr std::array kLikely{0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4};
    return kLikely.at(random.below(kLikely.size()));
}

// Slots waited at the n-th hop of a leg, so that they add up to a quarter of `quarters` per hop.
Ticks wait_at(int quarters, std::size_t hop) {
    const auto sum = [quarters](std::size_t hops) {
        return static_cast<Ticks>(hops) * quarters / 4;
    };
    return sum(hop) - sum(hop - 1);
}

// How many whole m there are with from <= moment + m * period < to.
Ticks times_within(Ticks from, Ticks to, Ticks moment, Ticks period) {
    const auto floor_div = [period](Ticks a) {
        return a >= 0 ? a / period : -((-a + period - 1) / period);
    };
    return floor_div(to - 1 - moment) - floor_div(from - 1 - moment);
}

}  // namespace

BlockShape random_shape(const Problem& problem, Random& random) {
    BlockShape shape;
    shape.grain = static_cast<int>(random.below(3));
    shape.fused = problem.split_has_price() && random.chance(30);
    shape.slack = random.chance(60) ? 0 : few(random);
    // Half of the time the same hop everywhere, which chance alone would rarely make.
    const bool even = random.chance(50);
    const int hop = some_quarters(random);
    for (std::size_t leg = 0; leg < 2 * num_legs(problem); ++leg) {
        shape.hops.push_back(even ? hop : some_quarters(random));
        shape.turns.push_back(2 * few(random));
    }
    return shape;
}

BlockShape changed_shape(const BlockShape& shape, Random& random) {
    BlockShape changed = shape;
    const std::size_t times = 1 + random.below(3);
    for (std::size_t i = 0; i < times; ++i) {
        const std::size_t leg = random.below(shape.hops.size());
        const int step = random.chance(50) ? 1 : -1;
        switch (random.below(8)) {
            case 0:
                changed.slack = std::max(0, changed.slack + step);
                break;
            case 1:
                changed.grain = static_cast<int>(random.below(3));
                break;
            case 2:
            case 3:
            case 4:
                changed.hops[leg] = std::max(0, changed.hops[leg] + step);
                break;
            default:
                changed.turns[leg] = std::max(0, changed.turns[leg] + step);
        }
    }
    return changed;
}

BlockPlanner::BlockPlanner(const Problem& problem)
    : problem_(problem),
      length_(problem.time.size()),
      hop_(problem.num_stages),
      block_{0, std::vector<Ticks>(problem.time.size(), kNever)},
      busy_(problem.num_devices) {
    order_.rows.resize(problem.num_devices);
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        const std::size_t symbols = 3 * problem.stages[device].size();
        busy_[device].reserve(symbols);
        order_.rows[device].reserve(symbols * problem.num_microbatches);
    }
    sorted_.reserve(problem.time.size());
}

const Order* BlockPlanner::plan(const BlockShape& shape) {
    work_ += static_cast<std::int64_t>(12 * problem_.num_stages);
    set_lengths(shape);
    if (!lay_out(shape) || !within_cap()) return nullptr;
    work_ += static_cast<std::int64_t>(problem_.num_stages * problem_.num_microbatches);
    repeat();
    return &order_;
}

const Order* BlockPlanner::plan(const Block& block) {
    work_ += static_cast<std::int64_t>(12 * problem_.num_stages);
    block_ = block;
    if (!in_order() || !within_cap()) return nullptr;
    work_ += static_cast<std::int64_t>(problem_.num_stages * problem_.num_microbatches);
    repeat();
    return &order_;
}

// Whether the microbatch goes through the stages and back, and each W comes behind its I.
bool BlockPlanner::in_order() const {
    Ticks last = -1;
    for (std::size_t stage = 0; stage < problem_.num_stages; ++stage) {
        const Ticks forward = block_.at[symbol_of(stage, kForward)];
        if (forward <= last) return false;
        last = forward;
    }
    for (std::size_t stage = problem_.num_stages; stage-- > 0;) {
        const Ticks* at = &block_.at[symbol_of(stage, 0)];
        const Ticks backward = std::min(at[kInput], at[kBackward]);
        if (backward <= last || at[kWeight] <= backward) return false;
        last = backward;
    }
    return true;
}

Block changed_block(const Block& block, Random& random) {
    Block changed = block;
    const Ticks by = 1 + block.period * static_cast<Ticks>(random.below(64)) / 256;
    const Ticks step = random.chance(50) ? by : -by;
    std::size_t symbol = random.below(block.at.size());
    while (block.at[symbol] == kNever) symbol = (symbol + 1) % block.at.size();
    // The symbol alone, or everything that is later.
    const bool alone = random.chance(60);
    const Ticks from = block.at[symbol];
    for (std::size_t other = 0; other < block.at.size(); ++other) {
        Ticks& at = changed.at[other];
        if (at == kNever) continue;
        if (other == symbol || (!alone && at > from)) at += step;
    }
    const Ticks first = changed.at[symbol_of(0, kForward)];
    for (Ticks& at : changed.at) at -= at == kNever ? 0 : first;
    return changed;
}

void BlockPlanner::set_lengths(const BlockShape& shape) {
    const auto has = [&](Symbol symbol) {
        return op_of(symbol) == kForward || (op_of(symbol) == kBackward) == shape.fused;
    };
    Ticks total = 0;
    Ticks count = 0;
    for (Symbol symbol = 0; symbol < problem_.time.size(); ++symbol) {
        if (!has(symbol)) continue;
        total += problem_.time[symbol];
        ++count;
    }
    const Ticks average = total / count;
    // Slots can be divided when a block is changed.
    constexpr Ticks kSlot = 16;
    slot_ = shape.grain == 0 ? std::max<Ticks>(1, average / 2) : kSlot;
    for (Symbol symbol = 0; symbol < problem_.time.size(); ++symbol) {
        const Ticks time = problem_.time[symbol];
        const Ticks rounded = (shape.grain * time + average / 2) / average;
        length_[symbol] = shape.grain == 0 ? time : kSlot * std::max<Ticks>(1, rounded);
        if (!has(symbol)) length_[symbol] = 0;
    }
    for (std::size_t stage = 0; stage < problem_.num_stages; ++stage) {
        hop_[stage] = shape.grain == 0 ? problem_.hop[stage] : 0;
    }
    block_.period = 0;
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        Ticks work = 0;
        for (const std::size_t stage : problem_.stages[device]) {
            for (Symbol op = 0; op < kNumOps; ++op) work += length_[symbol_of(stage, op)];
        }
        block_.period = std::max(block_.period, work);
    }
    block_.period += shape.slack * slot_;
}

bool BlockPlanner::lay_out(const BlockShape& shape) {
    for (auto& busy : busy_) busy.clear();
    std::ranges::fill(block_.at, kNever);
    const std::size_t num_stages = problem_.num_stages;
    const std::size_t per_leg = problem_.num_devices;
    const std::size_t legs = num_legs(problem_);
    Ticks ready = 0;
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        const std::size_t leg = stage / per_leg;
        const std::size_t hop = stage % per_leg;
        ready += hop == 0 ? slot_ * shape.turns[leg] : slot_ * wait_at(shape.hops[leg], hop);
        const Symbol forward = symbol_of(stage, kForward);
        if (!place(forward, ready)) return false;
        ready = block_.at[forward] + length_[forward] + hop_[stage];
    }
    const Symbol back = shape.fused ? kBackward : kInput;
    for (std::size_t stage = num_stages; stage-- > 0;) {
        const std::size_t leg = 2 * legs - 1 - stage / per_leg;
        const std::size_t hop = per_leg - 1 - stage % per_leg;
        const bool begins = hop == 0 || stage + 1 == num_stages;
        ready += begins ? slot_ * shape.turns[leg] : slot_ * wait_at(shape.hops[leg], hop);
        const Symbol backward = symbol_of(stage, back);
        if (!place(backward, ready)) return false;
        ready = block_.at[backward] + length_[backward] + (stage > 0 ? hop_[stage - 1] : 0);
    }
    for (std::size_t stage = 0; stage < num_stages && !shape.fused; ++stage) {
        const Symbol input = symbol_of(stage, kInput);
        if (!place(symbol_of(stage, kWeight), block_.at[input] + length_[input])) return false;
    }
    return true;
}

// At the first moment from `ready` on at which the device is free in every period.
bool BlockPlanner::place(Symbol symbol, Ticks ready) {
    std::vector<Busy>& busy = busy_[problem_.device_of[stage_of(symbol)]];
    const Ticks length = length_[symbol];
    Ticks at = ready;
    for (std::size_t clear = 0, i = 0; clear < busy.size(); i = (i + 1) % busy.size()) {
        if (at > ready + 2 * block_.period) return false;
        const Ticks phase = at % block_.period;
        // Up to two periods on, since the new action may reach over the period's end.
        const Ticks shift = busy[i].end <= phase ? block_.period : 0;
        if (phase + length <= busy[i].begin + shift) {
            ++clear;
            continue;
        }
        at += busy[i].end + shift - phase;
        clear = 0;
    }
    block_.at[symbol] = at;
    const Ticks phase = at % block_.period;
    busy.push_back({phase, phase + length});
    if (phase + length > block_.period)
        busy.push_back({phase - block_.period, phase + length - block_.period});
    return true;
}

Ticks BlockPlanner::held_at(std::size_t device, Ticks moment) const {
    Ticks held = 0;
    for (const std::size_t stage : problem_.stages[device]) {
        const Ticks from = block_.at[symbol_of(stage, kForward)];
        for (const Symbol op : {kInput, kWeight, kBackward}) {
            const Symbol gives = symbol_of(stage, op);
            if (block_.at[gives] == kNever) continue;
            // Alike is taken as later.
            const Ticks to = block_.at[gives] + 1;
            held -= problem_.takes[gives] * times_within(from, to, moment, block_.period);
        }
    }
    return held;
}

bool BlockPlanner::within_cap() const {
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        for (const std::size_t stage : problem_.stages[device]) {
            if (held_at(device, block_.at[symbol_of(stage, kForward)]) > problem_.cap[device]) {
                return false;
            }
        }
    }
    return true;
}

// Period by period, which needs no sorting beyond that of one period.
void BlockPlanner::repeat() {
    const auto count = static_cast<Ticks>(problem_.num_microbatches);
    sorted_.clear();
    Ticks periods = 0;
    for (Symbol symbol = 0; symbol < block_.at.size(); ++symbol) {
        if (block_.at[symbol] == kNever) continue;
        sorted_.push_back(symbol);
        periods = std::max(periods, block_.at[symbol] / block_.period + count);
    }
    std::ranges::sort(sorted_, {}, [this](Symbol symbol) {
        return std::pair(block_.at[symbol] % block_.period, symbol);
    });
    for (Symbols& row : order_.rows) row.clear();
    for (Ticks period = 0; period < periods; ++period) {
        for (const Symbol symbol : sorted_) {
            const Ticks microbatch = period - block_.at[symbol] / block_.period;
            if (microbatch < 0 || microbatch >= count) continue;
            order_.rows[problem_.device_of[stage_of(symbol)]].push_back(symbol);
        }
    }
}

}  // namespace pykern
