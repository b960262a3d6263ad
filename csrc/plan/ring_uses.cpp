#include "plan/ring_uses.hpp"

#include <algorithm>
#include <optional>

#include "plan/cell_slots.hpp"
#include "plan/simulate.hpp"

namespace pykern {

namespace {

// How much of a row has ended by then.
std::size_t num_ended(const std::vector<Span>& row, double time_ns) {
    const auto behind = std::ranges::upper_bound(row, time_ns, {}, &Span::end_ns);
    return static_cast<std::size_t>(behind - row.begin());
}

}  // namespace

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
    : links_(plan), uses_(links_.all().size()) {
    std::optional<Timeline> timeline;
    if (!plan.has(Kind::B) && !plan.has(Kind::I)) timeline = simulate(plan, Costs(1.0, 2.0));
    for (std::size_t sender = 0; sender < plan.rows().size(); ++sender) {
        const Row& row = plan.rows()[sender];
        for (std::size_t position = 0; position < row.size(); ++position) {
            const Action action = row[position];
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
            if (!timeline) continue;
            const auto& spans = timeline->rows();
            RingUse& use = uses_[number].back();
            use.from = std::min(use.from, num_ended(spans[static_cast<std::size_t>(receiver)],
                                                    spans[sender][position].end_ns));
        }
    }
    for (std::vector<RingUse>& uses : uses_) {
        for (std::size_t i = uses.size(); i-- > 1;) {
            uses[i - 1].from = std::min(uses[i - 1].from, uses[i].from);
        }
    }
}

}  // namespace pykern
