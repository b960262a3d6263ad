// Timeline: what ran when. The simulator predicts one, a trace measures one; everything else is
// shared.
#pragma once

#include <vector>

#include "plan/action.hpp"

namespace pykern {

struct Span {
    Action action;
    double start_ns = 0;
    double end_ns = 0;

    friend bool operator==(const Span&, const Span&) = default;
};

// Invariant: one row per device, spans in order of start, times finite. Times count from the start
// of the step.
class Timeline {
   public:
    explicit Timeline(std::vector<std::vector<Span>> rows);

    const std::vector<std::vector<Span>>& rows() const { return rows_; }
    int num_devices() const { return static_cast<int>(rows_.size()); }
    // 0 where nothing ran.
    double first_start_ns() const;
    // From the first start to the last end over all devices.
    double makespan_ns() const;
    // Time of the device that takes longest, from its own first start to its own last end: the
    // "cost" of the zero-bubble papers, what a step takes where no device waits for another's
    // update.
    double span_ns() const;
    // Time in which the device computes; of two actions side by side it counts once.
    double busy_ns(int device) const;
    // Idle device time divided by makespan, averaged over the devices: 0...1.
    double bubble_ratio() const;
    // The same of span_ns instead of the makespan.
    double span_bubble_ratio() const;
    // Most microbatches held at once on the device, in chunks: from the start of F to the end of
    // the last of F, B, I and W, which is F where a stage has forwards alone. One that is
    // recomputed counts from its F on as well: it holds its slot and its input.
    int peak_in_flight(int device) const;

    friend bool operator==(const Timeline&, const Timeline&) = default;

   private:
    double idle_share(double total_ns) const;

    std::vector<std::vector<Span>> rows_;
};

}  // namespace pykern
