// Costs: how long each action takes, as the simulator is told.
#pragma once

#include <variant>
#include <vector>

#include "plan/action.hpp"

namespace pykern {

// One time for every stage, or one for each.
using StageTimes = std::variant<double, std::vector<double>>;

// Invariant: every time is finite and not negative, in nanoseconds.
class Costs {
   public:
    Costs(StageTimes forward_ns, StageTimes backward_ns, double transfer_ns = 0);

    const StageTimes& forward_ns() const { return forward_ns_; }
    const StageTimes& backward_ns() const { return backward_ns_; }
    // From the end on one device to the earliest start on another; it blocks neither.
    double transfer_ns() const { return transfer_ns_; }

    // Of an F or a B whose stage has a time.
    double of(Action action) const;
    // Throws std::invalid_argument where a list has other than `num_stages` times.
    void require_stages(int num_stages) const;

    friend bool operator==(const Costs&, const Costs&) = default;

   private:
    StageTimes forward_ns_;
    StageTimes backward_ns_;
    double transfer_ns_;
};

}  // namespace pykern
