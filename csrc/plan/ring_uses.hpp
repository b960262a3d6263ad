// Ring uses: from when to when a copy needs its slot, in positions of the receiver's row.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/action.hpp"
#include "plan/index.hpp"
#include "plan/links.hpp"
#include "plan/plan.hpp"

namespace pykern {

struct RingUse {
    Action copy;
    // An action before this position has freed the slot.
    std::size_t from;
    // Position of the action whose end frees the slot.
    std::size_t to;
};

// The uses of one link, in the order of its copies.
//
// A copy may start when the receiver starts the slot ahead of the copy's reader, so the actions
// before that slot may free what it overwrites. A lane is a queue, though: who waits in it makes
// all behind wait too. So `from` is the least of what the copy and those behind it ask for, and
// waiting for a slot can never deadlock: in any order that the plan can run in, put each copy right
// before the first reader of it and those behind it. The actions it waits for are further ahead.
//
// In a plan without backwards a slot's next F also waits until what the slot held has been sent on.
// So there a copy may start when its source ends, in a timetable in which all forwards take equally
// long: what it waits for has ended by then, and what waits for it comes later.
class RingUses {
   public:
    // The plan must have passed `check`.
    RingUses(const Plan& plan, const Index& index);

    const Links& links() const { return links_; }
    const std::vector<RingUse>& of(std::size_t link) const { return uses_[link]; }

   private:
    Links links_;
    std::vector<std::vector<RingUse>> uses_;
};

// Activations that COPY_F brings are read by an F, gradients of COPY_B by a B or I, of the next
// stage or the one before.
Action reader_of(Action copy, const Index& index);

}  // namespace pykern
