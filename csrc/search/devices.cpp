#include "search/devices.hpp"

namespace pykern {

Devices::Devices(const Problem& problem)
    : problem_(problem),
      started_(problem.time.size()),
      forward_end_(problem.num_stages * problem.num_microbatches),
      backward_end_(forward_end_.size()),
      free_at_(problem.num_devices),
      held_(problem.num_devices),
      forwards_left_(problem.num_devices) {
    order_.rows.resize(problem.num_devices);
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        order_.rows[device].reserve(3 * problem.stages[device].size() * problem.num_microbatches);
    }
    events_.reserve(2 * forward_end_.size());
}

void Devices::reset() {
    std::ranges::fill(started_, 0);
    std::ranges::fill(free_at_, 0);
    std::ranges::fill(held_, 0);
    for (Symbols& row : order_.rows) row.clear();
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        forwards_left_[device] = problem_.stages[device].size() * problem_.num_microbatches;
    }
    makespan_ = 0;
    events_.clear();
    for (std::size_t device = 0; device < problem_.num_devices; ++device) push(0, device);
}

void Devices::push(Ticks time, std::size_t device) {
    events_.push_back({time, device});
    std::ranges::push_heap(events_, later);
}

Ticks Devices::arrival(Symbol symbol) const {
    const std::size_t stage = stage_of(symbol);
    const std::size_t count = problem_.num_microbatches;
    if (op_of(symbol) == kWeight) {
        return started_[symbol] < started_[symbol_of(stage, kInput)] ? 0 : kNever;
    }
    const bool forward = op_of(symbol) == kForward;
    if (problem_.forwards_first && !forward && forwards_left_[problem_.device_of[stage]] > 0) {
        return kNever;
    }
    const std::size_t next = forward ? started_[symbol] : backwards(stage);
    if (next == count) return kNever;
    if (forward) {
        if (stage == 0) return 0;
        if (started_[symbol_of(stage - 1, kForward)] <= next) return kNever;
        return forward_end_[(stage - 1) * count + next] + problem_.hop[stage - 1];
    }
    if (started_[symbol_of(stage, kForward)] <= next) return kNever;
    if (stage + 1 == problem_.num_stages) return forward_end_[stage * count + next];
    if (backwards(stage + 1) <= next) return kNever;
    return backward_end_[(stage + 1) * count + next] + problem_.hop[stage];
}

void Devices::start(std::size_t device, Symbol symbol, Ticks now) {
    const std::size_t stage = stage_of(symbol);
    const Ticks end = now + problem_.time[symbol];
    if (op_of(symbol) == kForward) {
        --forwards_left_[device];
        forward_end_[stage * problem_.num_microbatches + started_[symbol]] = end;
        if (stage + 1 < problem_.num_stages) {
            push(end + problem_.hop[stage], problem_.device_of[stage + 1]);
        }
    } else if (is_backward(symbol)) {
        backward_end_[stage * problem_.num_microbatches + backwards(stage)] = end;
        if (stage > 0) push(end + problem_.hop[stage - 1], problem_.device_of[stage - 1]);
    }
    ++started_[symbol];
    held_[device] += problem_.takes[symbol];
    free_at_[device] = end;
    makespan_ = std::max(makespan_, end);
    order_.rows[device].push_back(symbol);
    push(end, device);
}

bool Devices::finished() const {
    for (std::size_t stage = 0; stage < problem_.num_stages; ++stage) {
        const std::size_t inputs = started_[symbol_of(stage, kInput)];
        if (backwards(stage) != problem_.num_microbatches) return false;
        if (started_[symbol_of(stage, kWeight)] != inputs) return false;
    }
    return true;
}

}  // namespace pykern
