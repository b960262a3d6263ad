// Links: which action's result goes from one device to another, and over which pair of devices.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/action.hpp"
#include "plan/plan.hpp"

namespace pykern {

struct Link {
    int from;
    int to;

    friend bool operator==(const Link&, const Link&) = default;
};

// A link is a directed pair of devices. F sends its result to the next stage, B and I send theirs
// to the one before if that has a backward; nothing else is a message. (REDUCE and U wait for other
// devices too, but what a reduction moves is in its own time.)
class Links {
   public:
    static constexpr int kStays = -1;

    explicit Links(const Plan& plan);

    const std::vector<Link>& all() const { return links_; }
    // Number of the link that the action's result goes over, or kStays.
    int of(Action action) const {
        const std::size_t boundary =
            static_cast<std::size_t>(placement_.replica_of(action.microbatch)) *
                static_cast<std::size_t>(placement_.num_stages()) +
            action.stage;
        if (action.kind == Kind::F) return forward_[boundary];
        return action.kind == Kind::B || action.kind == Kind::I ? backward_[boundary] : kStays;
    }

   private:
    const Placement& placement_;
    std::vector<Link> links_;
    // By replica and stage.
    std::vector<int> forward_;
    std::vector<int> backward_;
};

}  // namespace pykern
