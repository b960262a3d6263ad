// Index: where in its plan an action stands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/action.hpp"
#include "plan/plan.hpp"

namespace pykern {

// Positions count through all rows of the plan, one row after the other. A dense array per kind
// that occurs, so that a look-up is one load. Every action's numbers must be in the plan's range.
class Index {
   public:
    explicit Index(const Plan& plan);

    int num_stages() const { return num_stages_; }
    int num_microbatches() const { return num_microbatches_; }
    int num_slices() const { return num_slices_; }

    // Position of the action, the first where it stands twice, or -1 where it is absent.
    int at(Action action) const {
        const std::vector<std::int32_t>& positions = positions_[kind_of(action)];
        return positions.empty() ? -1 : positions[cell_of(action)];
    }
    bool has(Kind kind) const { return !positions_[static_cast<std::size_t>(kind)].empty(); }
    // Position of the first action of a device's row; of num_devices, the number of actions.
    int row_start(int device) const { return row_starts_[static_cast<std::size_t>(device)]; }

   private:
    static std::size_t kind_of(Action action) { return static_cast<std::size_t>(action.kind); }
    std::size_t cell_of(Action action) const {
        const std::size_t microbatch =
            action.stage * static_cast<std::size_t>(num_microbatches_) + action.microbatch;
        return microbatch * static_cast<std::size_t>(num_slices_) + action.slice;
    }

    int num_stages_;
    int num_microbatches_;
    int num_slices_;
    std::array<std::vector<std::int32_t>, kNumKinds> positions_;
    std::vector<int> row_starts_;
};

}  // namespace pykern
