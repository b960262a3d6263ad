// Clock: tells the time in a walk over a plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "plan/action.hpp"
#include "plan/costs.hpp"
#include "plan/index.hpp"
#include "plan/links.hpp"
#include "plan/plan.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// Every device runs its row in order, each action as soon as the one before it is done and its
// inputs are there. Sending blocks no device.
class Clock {
   public:
    // Throws std::invalid_argument where the costs are of another number of stages or devices.
    Clock(const Plan& plan, const Costs& costs);

    // The functions that a walk calls. Inputs of the same row need no look: the device is not free
    // before.
    void begin() { ready_ns_ = 0; }
    void input(Action action, Action input, std::size_t sender, std::size_t position) {
        ready_ns_ = std::max(ready_ns_, arrival_ns(action, input, sender, position));
    }
    void finish(std::size_t device, std::size_t position, std::size_t together);

    // For a walk that moves an action within its row: how long the device waits before the slot
    // that the walk is at, the action put ahead of that slot, and left out where it stands. It must
    // be one that sends nothing and needs nothing from other devices.
    double wait_ns(std::size_t device) const { return ready_ns_ - free_ns_[device]; }
    void put(std::size_t device, Action action) { free_ns_[device] += duration_ns(device, action); }
    void leave_out(std::size_t device, std::size_t position);
    double duration_ns(std::size_t device, Action action) const;

    // When an input, which stands at a position of another device's row, is there for the action.
    double arrival_ns(Action action, Action input, std::size_t sender, std::size_t position) const {
        const double end_ns = rows_[sender][position].end_ns;
        // Gradients on their way to REDUCE, or from it, are not a message.
        if (action.stage == input.stage) return end_ns + transfer_ns_;
        const double sent_ns =
            shared_links_ ? sent_ns_[sender][position] : end_ns + message_ns_[boundary_of(input)];
        return sent_ns + transfer_ns_;
    }
    const std::vector<std::vector<Span>>& rows() const { return rows_; }
    std::vector<std::vector<Span>> take_rows() && { return std::move(rows_); }

   private:
    // Boundary s is behind stage s: a forward crosses its own, a backward the one before.
    static std::size_t boundary_of(Action action) {
        return action.kind == Kind::F ? action.stage : action.stage - 1U;
    }
    void send(std::size_t device, Action action, double end_ns);

    const Plan& plan_;
    const Links links_;
    double transfer_ns_;
    double overhead_ns_;
    double hidden_;  // share of a pair's shorter action
    bool shared_links_;
    // By kind and stage, at speed 1; by device; by boundary.
    std::vector<double> durations_ns_;
    std::vector<double> speeds_;
    std::vector<double> message_ns_;
    // Only where links are shared: by link, and by device and position.
    std::vector<double> link_free_ns_;
    std::vector<std::vector<double>> sent_ns_;
    std::vector<std::vector<Span>> rows_;
    // By device: when the last of what it has run ended.
    std::vector<double> free_ns_;
    double ready_ns_ = 0;
};

// The result of a simulation. It refers to the plan.
struct Simulated {
    Index index;
    Clock clock;
};

// Checks the plan in the same walk. Throws as `simulate` does.
Simulated run_clock(const Plan& plan, const Costs& costs);

}  // namespace pykern
