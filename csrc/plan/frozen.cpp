#include "plan/frozen.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/check.hpp"
#include "plan/require.hpp"

namespace pykern {

namespace {

class Freezing {
   public:
    Freezing(const Plan& plan, const std::vector<int>& stages)
        : is_frozen_(static_cast<std::size_t>(plan.num_stages()), false) {
        for (const int stage : stages) {
            require_range("stages", stage, 0, plan.num_stages() - 1);
            is_frozen_[static_cast<std::size_t>(stage)] = true;
        }
        first_trained_ =
            static_cast<std::size_t>(std::ranges::find(is_frozen_, false) - is_frozen_.begin());
        if (first_trained_ == is_frozen_.size()) {
            throw std::invalid_argument("stages must leave one to train, got all " +
                                        std::to_string(is_frozen_.size()) +
                                        ". A plan of forwards alone is plan.forward_only()");
        }
    }

    // The action that the plan keeps in the place of another; nothing where it keeps none.
    std::optional<Action> operator()(Action action) const {
        if (action.kind == Kind::F || !is_frozen_[action.stage]) return action;
        if (action.stage < first_trained_ || action.kind == Kind::W) return std::nullopt;
        return action.kind == Kind::I ? with_kind(action, Kind::B) : action;
    }

   private:
    std::vector<bool> is_frozen_;
    std::size_t first_trained_ = 0;
};

}  // namespace

Plan with_frozen(const Plan& plan, const std::vector<int>& stages) {
    check(plan);
    const Freezing frozen(plan, stages);
    std::vector<Row> rows(plan.rows().size());
    std::vector<Overlaps> overlaps(plan.rows().size());
    for (std::size_t device = 0; device < rows.size(); ++device) {
        const Row& row = plan.rows()[device];
        const Overlaps& starts = plan.overlaps()[device];
        for (std::size_t position = 0; position < row.size(); ++position) {
            const std::optional<Action> kept = frozen(row[position]);
            if (!kept) continue;
            const bool pair = std::ranges::binary_search(starts, position);
            if (pair && frozen(row[position + 1])) overlaps[device].push_back(rows[device].size());
            rows[device].push_back(*kept);
        }
    }
    return checked({plan.placement(), plan.num_microbatches(), std::move(rows), plan.num_slices(),
                    std::move(overlaps)});
}

}  // namespace pykern
