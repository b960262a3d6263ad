// Plan: one row of actions per device, in the order in which the device runs them.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "plan/action.hpp"
#include "plan/placement.hpp"

namespace pykern {

using Row = std::vector<Action>;
// Ascending positions of a row; the action there shares its slot with the one after it: both start
// together and are computed side by side.
using Overlaps = std::vector<std::size_t>;

// Where the slot begins that this position of the row is in.
std::size_t slot_start(const Overlaps& overlaps, std::size_t position);

// Most (stage, microbatch, slice) cells of one plan: it bounds the memory that a plan from a
// stranger takes.
inline constexpr int kMaxCells = 1 << 24;
// The range of an Action's slice number.
inline constexpr int kMaxSlices = 256;

// Throws std::invalid_argument where a plan of this size would be empty or larger than that.
void require_plan_size(int num_stages, int num_microbatches, int num_slices = 1);

// Whether a plan has passed `check`. Copies of a plan know it, and equality does not ask for it.
// Any thread may check an immutable plan. Relaxed: a flag that is seen late means one more check.
class Passed {
   public:
    Passed() = default;
    Passed(const Passed& other) : passed_(static_cast<bool>(other)) {}
    Passed& operator=(const Passed& other) {
        passed_.store(static_cast<bool>(other), std::memory_order_relaxed);
        return *this;
    }
    ~Passed() = default;

    explicit operator bool() const { return passed_.load(std::memory_order_relaxed); }
    void set() const { passed_.store(true, std::memory_order_relaxed); }
    friend bool operator==(const Passed& /*one*/, const Passed& /*other*/) { return true; }

   private:
    mutable std::atomic<bool> passed_ = false;
};

// An immutable value. A Plan may be wrong; `check` (check.hpp) says whether it can run.
class Plan {
   public:
    // `overlaps` holds a list for each row, or none at all.
    Plan(Placement placement, int num_microbatches, std::vector<Row> rows, int num_slices = 1,
         std::vector<Overlaps> overlaps = {});

    const Placement& placement() const { return placement_; }
    int num_devices() const { return placement_.num_devices(); }
    int num_stages() const { return placement_.num_stages(); }
    int num_microbatches() const { return num_microbatches_; }
    // Parts of a microbatch along the sequence, each an item of its own.
    int num_slices() const { return num_slices_; }
    const std::vector<Row>& rows() const { return rows_; }
    const std::vector<Overlaps>& overlaps() const { return overlaps_; }
    std::size_t num_actions() const;
    const Passed& passed() const { return passed_; }

    // The device of the stage, in the replica that has the microbatch.
    int device_of(Action action) const {
        return placement_.device_of(action.stage, placement_.replica_of(action.microbatch));
    }
    bool has(Kind kind) const;
    // The first stage with a backward; the number of stages where no stage has one.
    int first_trained() const;

    // The same plan with its forward actions only: what inference runs.
    Plan forward_only() const;

    friend bool operator==(const Plan&, const Plan&) = default;

   private:
    Placement placement_;
    int num_microbatches_;
    int num_slices_;
    std::vector<Row> rows_;
    std::vector<Overlaps> overlaps_;
    Passed passed_;
};

// Equal plans have equal ones.
std::size_t hash_of(const Plan& plan);

}  // namespace pykern
