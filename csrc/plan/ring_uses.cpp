#include "plan/ring_uses.hpp"

#include <algorithm>

namespace pykern {

namespace {

// What COPY_F and COPY_B bring is read by an F, or by a B or I, of the next stage or the one
// before.
Action reader_of(Action copy, const Index& index) {
    Action reader = copy;
    if (copy.kind == Kind::COPY_F) {
        reader.kind = Kind::F;
        ++reader.stage;
        return reader;
    }
    reader.kind = Kind::B;
    --reader.stage;
    if (index.at(reader) < 0) reader.kind = Kind::I;
    return reader;
}

// Position of the action that ends the stage's work on the reader's microbatch.
int last_use_of(Action reader, const Index& index) {
    for (const Kind kind : {Kind::W, Kind::B}) {
        Action action = reader;
        action.kind = kind;
        if (const int position = index.at(action); position >= 0) return position;
    }
    return index.at(reader);
}

std::size_t slot_start(const Overlaps& starts, std::size_t position) {
    const bool second = position > 0 && std::ranges::binary_search(starts, position - 1);
    return position - (second ? 1 : 0);
}

}  // namespace

RingUses::RingUses(const Plan& plan, const Index& index)
    : links_(plan.placement()), uses_(links_.all().size()) {
    for (const Row& row : plan.rows()) {
        for (const Action& action : row) {
            const int link = links_.of(action);
            if (link == Links::kStays) continue;
            const auto number = static_cast<std::size_t>(link);
            const int receiver = links_.all()[number].to;
            const int row_start = index.row_start(receiver);
            Action copy = action;
            copy.kind = action.kind == Kind::F ? Kind::COPY_F : Kind::COPY_B;
            const Action reader = reader_of(copy, index);
            const Overlaps& starts = plan.overlaps()[static_cast<std::size_t>(receiver)];
            const std::size_t slot =
                slot_start(starts, static_cast<std::size_t>(index.at(reader) - row_start));
            uses_[number].push_back(
                {.copy = copy,
                 .from = slot == 0 ? 0 : slot_start(starts, slot - 1),
                 .to = static_cast<std::size_t>(last_use_of(reader, index) - row_start)});
        }
    }
    for (std::vector<RingUse>& uses : uses_) {
        for (std::size_t i = uses.size(); i-- > 1;) {
            uses[i - 1].from = std::min(uses[i - 1].from, uses[i].from);
        }
    }
}

std::size_t ring_of(const Placement& placement, Action copy) {
    const auto num_stages = static_cast<std::size_t>(placement.num_stages());
    const auto replica = static_cast<std::size_t>(placement.replica_of(copy.microbatch));
    return (2 * replica + (copy.kind == Kind::COPY_B ? 1 : 0)) * num_stages + copy.stage;
}

std::size_t num_rings(const Placement& placement) {
    return 2 * placement.replicas().size() * static_cast<std::size_t>(placement.num_stages());
}

}  // namespace pykern
