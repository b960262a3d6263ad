// Cell slots: where a microbatch lives at its stage while the stage works on it.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/action.hpp"
#include "plan/index.hpp"
#include "plan/plan.hpp"

namespace pykern {

// Every stage of every replica has a ring of slots. A cell is a microbatch or slice of one at a
// stage. It holds a slot from the copy that brings its input, or else from its F, to the end of its
// B or W: so its R finds the input there. In a plan without backwards it holds the slot to the end
// of its F. Data for the cell lands in its slot: the input, and later the gradient of its output,
// which needs no wait of its own, because by then the cell has the slot.
class CellSlots {
   public:
    static constexpr int kNone = -1;

    explicit CellSlots(const Plan& plan);

    // Slot of the action's cell.
    int of(Action action) const { return slots_[cell_of(action)]; }
    void give(Action action, int slot);
    // Slots of the stage in that replica so far.
    int num_slots(int replica, int stage) const { return num_slots_[ring_of(replica, stage)]; }

    // Gives slots to the cells that no copy has brought one: those of stages whose input stays on
    // their device.
    void give_to_rest(const Plan& plan, const Index& index);

   private:
    std::size_t cell_of(Action action) const {
        return (action.stage * num_microbatches_ + action.microbatch) * num_slices_ + action.slice;
    }
    std::size_t ring_of(int replica, int stage) const {
        return static_cast<std::size_t>(replica) * num_stages_ + static_cast<std::size_t>(stage);
    }

    Placement placement_;
    std::size_t num_stages_;
    std::size_t num_microbatches_;
    std::size_t num_slices_;
    std::vector<int> slots_;
    std::vector<int> num_slots_;
};

// Gives out the slots of one ring as they become free. Cells come in ascending order of `from`, and
// always taking the slot that was freed first then needs as few as are in use at once.
class FreeSlots {
   public:
    struct Taken {
        int slot;
        // Position of the action that has freed it, or kNeverUsed.
        std::size_t freed_at;
    };
    static constexpr std::size_t kNeverUsed = static_cast<std::size_t>(-1);

    // Slots that were freed before `from` may be taken; the slot is free again after position `to`.
    Taken take(std::size_t from, std::size_t to);

   private:
    struct Use {
        std::size_t to;
        int slot;
        friend auto operator<=>(const Use&, const Use&) = default;
    };
    // A heap, the slot that is freed first on top.
    std::vector<Use> uses_;
    int num_slots_ = 0;
};

// Position of the action that ends the work on this action's cell.
int last_use_of(Action action, const Index& index);

}  // namespace pykern
