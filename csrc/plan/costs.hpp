// Costs: how long each action takes, as the simulator is told.
#pragma once

#include <optional>

#include "plan/action.hpp"
#include "plan/stage_values.hpp"

namespace pykern {

// Invariant: every time is finite and not negative, in nanoseconds.
class Costs {
   public:
    // Where the halves of a backward are not given, each is half of it.
    Costs(StageValues forward_ns, StageValues backward_ns, double transfer_ns = 0,
          std::optional<StageValues> input_ns = {}, std::optional<StageValues> weight_ns = {});

    const StageValues& forward_ns() const { return forward_ns_; }
    const StageValues& backward_ns() const { return backward_ns_; }
    const StageValues& input_ns() const { return input_ns_; }
    const StageValues& weight_ns() const { return weight_ns_; }
    // From the end on one device to the earliest start on another; it blocks neither.
    double transfer_ns() const { return transfer_ns_; }

    // Of an action whose stage has a time. R takes what F takes; U, REDUCE, OFFLOAD and LOAD take
    // no time.
    double of(Action action) const;
    // Throws std::invalid_argument where a list has other than `num_stages` times.
    void require_stages(int num_stages) const;

    friend bool operator==(const Costs&, const Costs&) = default;

   private:
    StageValues forward_ns_;
    StageValues backward_ns_;
    StageValues input_ns_;
    StageValues weight_ns_;
    double transfer_ns_;
};

}  // namespace pykern
