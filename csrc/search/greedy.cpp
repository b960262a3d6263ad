#include "search/greedy.hpp"

#include <algorithm>

namespace pykern {

std::vector<GreedyRules> greedy_sweep(bool with_fused) {
    std::vector<GreedyRules> sweep;
    for (const bool fused : {false, true}) {
        if (fused && !with_fused) continue;
        for (const bool deepest_first : {true, false}) {
            for (const int level : {0, 15, 100}) {
                for (const int gap : {100, 50, 0}) {
                    for (const int yields : {0, 100}) {
                        sweep.push_back({deepest_first, fused, gap, yields, level});
                    }
                }
            }
        }
    }
    return sweep;
}

Greedy::Greedy(Devices& devices, const GreedyRules& rules)
    : devices_(devices),
      problem_(devices.problem()),
      rules_(rules),
      back_(rules.fused ? kBackward : kInput),
      most_(problem_.num_stages, 1) {
    for (std::size_t device = 0; device < problem_.num_devices; ++device) share_out(device);
}

// Gives the device's memory to its stages one microbatch at a time, to the stage that has least for
// the time from its F to the end of its W.
void Greedy::share_out(std::size_t device) {
    std::vector<Ticks> lifetime(problem_.num_stages, 0);
    Ticks total = 0;
    for (std::size_t stage = problem_.num_stages; stage-- > 0;) {
        const Ticks* time = &problem_.time[symbol_of(stage, 0)];
        total += time[kForward] + time[kInput] + 2 * problem_.hop[stage];
        lifetime[stage] = total + time[kWeight];
    }
    for (Ticks& each : lifetime) each += total * rules_.level_percent / 100;
    Ticks left = problem_.cap[device];
    for (const std::size_t stage : problem_.stages[device]) {
        left -= problem_.takes[symbol_of(stage, kForward)];
    }
    while (true) {
        std::optional<std::size_t> poorest;
        for (const std::size_t stage : problem_.stages[device]) {
            if (problem_.takes[symbol_of(stage, kForward)] > left) continue;
            if (most_[stage] >= problem_.num_microbatches) continue;
            const auto need = [&](std::size_t s) {
                return lifetime[s] / static_cast<Ticks>(most_[s]);
            };
            if (!poorest || need(stage) > need(*poorest)) poorest = stage;
        }
        if (!poorest) return;
        ++most_[*poorest];
        left -= problem_.takes[symbol_of(*poorest, kForward)];
    }
}

bool Greedy::may_enter(std::size_t device, std::size_t stage) const {
    const Symbol gives = symbol_of(stage, rules_.fused ? kBackward : kWeight);
    const Symbol forward = symbol_of(stage, kForward);
    return devices_.started(forward) - devices_.started(gives) < most_[stage] &&
           devices_.held(device) + problem_.takes[forward] <= problem_.cap[device];
}

std::optional<Symbol> Greedy::backward(std::size_t device, Ticks now) const {
    std::optional<Symbol> best;
    for (const std::size_t stage : problem_.stages[device]) {
        const Symbol symbol = symbol_of(stage, back_);
        if (devices_.arrival(symbol) > now) continue;
        if (!best || devices_.backwards(stage) <= devices_.backwards(stage_of(*best)))
            best = symbol;
    }
    return best;
}

std::optional<Symbol> Greedy::forward(std::size_t device, Ticks now) const {
    std::optional<Symbol> best;
    for (const std::size_t stage : problem_.stages[device]) {
        const Symbol symbol = symbol_of(stage, kForward);
        if (devices_.arrival(symbol) > now || !may_enter(device, stage)) continue;
        if (!best || rules_.deepest_first || devices_.started(symbol) < devices_.started(*best)) {
            best = symbol;
        }
    }
    return best;
}

std::optional<Symbol> Greedy::weight(std::size_t device) const {
    std::optional<Symbol> best;
    for (const std::size_t stage : problem_.stages[device]) {
        const Symbol symbol = symbol_of(stage, kWeight);
        if (devices_.arrival(symbol) != 0) continue;
        if (!best || devices_.started(symbol) < devices_.started(*best)) best = symbol;
    }
    return best;
}

Ticks Greedy::next_arrival(std::size_t device, Symbol op, Ticks now) const {
    Ticks next = kNever;
    for (const std::size_t stage : problem_.stages[device]) {
        if (op == kForward && !may_enter(device, stage)) continue;
        const Ticks arrival = devices_.arrival(symbol_of(stage, op));
        if (arrival > now) next = std::min(next, arrival);
    }
    return next;
}

std::optional<Symbol> Greedy::pick(std::size_t device, Ticks now) const {
    if (const auto symbol = backward(device, now)) return symbol;
    const Ticks next_back = next_arrival(device, back_, now);
    const auto waits_for_it = [&](Symbol symbol) {
        return next_back != kNever &&
               (next_back - now) * 100 < problem_.time[symbol] * rules_.yield_percent;
    };
    const auto entering = forward(device, now);
    if (entering && !waits_for_it(*entering)) return entering;
    const auto filling = weight(device);
    if (!filling) return std::nullopt;
    const Ticks gap_end = std::min(next_back, next_arrival(device, kForward, now));
    const bool gap_is_long =
        gap_end == kNever || (gap_end - now) * 100 >= problem_.time[*filling] * rules_.gap_percent;
    return gap_is_long ? filling : std::nullopt;
}

}  // namespace pykern
