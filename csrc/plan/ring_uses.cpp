#include "plan/ring_uses.hpp"

#include <algorithm>

#include "plan/cell_slots.hpp"

namespace pykern {

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

}  // namespace pykern
