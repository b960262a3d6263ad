// Plan: one row of actions per device, in the order in which the device runs them.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/action.hpp"
#include "plan/placement.hpp"

namespace pykern {

using Row = std::vector<Action>;

// Most (stage, microbatch) pairs of one plan: it bounds the memory that a plan from a stranger
// takes.
inline constexpr int kMaxCells = 1 << 24;

// Throws std::invalid_argument where a plan of this size would be empty or larger than that.
void require_plan_size(int num_stages, int num_microbatches);

// An immutable value. A Plan may be wrong; `check` (check.hpp) says whether it can run.
class Plan {
   public:
    Plan(Placement placement, int num_microbatches, std::vector<Row> rows);

    const Placement& placement() const { return placement_; }
    int num_devices() const { return placement_.num_devices(); }
    int num_stages() const { return placement_.num_stages(); }
    int num_microbatches() const { return num_microbatches_; }
    const std::vector<Row>& rows() const { return rows_; }
    std::size_t num_actions() const;

    // The same plan with its forward actions only: what inference runs.
    Plan forward_only() const;

    friend bool operator==(const Plan&, const Plan&) = default;

   private:
    Placement placement_;
    int num_microbatches_;
    std::vector<Row> rows_;
};

}  // namespace pykern
