// Devices: they run actions in time order, and a policy decides what each runs next.
//
// A device that is free asks its policy at every moment at which something may have changed: its
// own action ended, or an input from another device arrived.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "search/order.hpp"
#include "search/problem.hpp"
#include "search/schedule.hpp"

namespace pykern {

class Devices {
   public:
    explicit Devices(const Problem& problem);

    const Problem& problem() const { return problem_; }
    Ticks held(std::size_t device) const { return held_[device]; }
    // How often a symbol has been started; I and B of a stage count together as backwards.
    std::size_t started(Symbol symbol) const { return started_[symbol]; }
    std::size_t backwards(std::size_t stage) const {
        return started_[symbol_of(stage, kInput)] + started_[symbol_of(stage, kBackward)];
    }
    // When the inputs of the next occurrence of a symbol are there, kNever where that is not known
    // yet or the symbol has no next one.
    Ticks arrival(Symbol symbol) const;

    // Lets policy.pick(device, now) choose a symbol or nothing until no device can go on, and
    // returns the order. Nothing where actions are left: the policy has run itself into a corner.
    template <class Policy>
    std::optional<Order> run(Policy& policy);

    Ticks makespan() const { return makespan_; }
    std::int64_t work() const { return work_; }

   private:
    struct Event {
        Ticks time;
        std::size_t device;
    };
    // For a heap that gives the earliest first.
    static bool later(const Event& a, const Event& b) {
        return a.time != b.time ? a.time > b.time : a.device > b.device;
    }

    void reset();
    void push(Ticks time, std::size_t device);
    void start(std::size_t device, Symbol symbol, Ticks now);
    bool finished() const;

    const Problem& problem_;
    std::vector<std::size_t> started_;
    std::vector<Ticks> forward_end_;  // per stage and microbatch
    std::vector<Ticks> backward_end_;
    std::vector<Ticks> free_at_;
    std::vector<Ticks> held_;
    std::vector<std::size_t> forwards_left_;  // per device
    std::vector<Event> events_;               // a heap
    Order order_;
    Ticks makespan_ = 0;
    std::int64_t work_ = 0;
};

template <class Policy>
std::optional<Order> Devices::run(Policy& policy) {
    reset();
    while (!events_.empty()) {
        std::ranges::pop_heap(events_, later);
        const Event event = events_.back();
        events_.pop_back();
        if (event.time < free_at_[event.device]) continue;
        work_ += 3;  // what one event takes, in actions timed
        const std::optional<Symbol> symbol = policy.pick(event.device, event.time);
        if (symbol) start(event.device, *symbol, event.time);
    }
    if (!finished()) return std::nullopt;
    return order_;
}

}  // namespace pykern
