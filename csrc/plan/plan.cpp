#include "plan/plan.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "plan/require.hpp"

namespace pykern {

void require_plan_size(int num_stages, int num_microbatches) {
    require_range("num_microbatches", num_microbatches, 1, kMaxCells);
    require_range("num_stages * num_microbatches", std::int64_t{num_stages} * num_microbatches, 1,
                  kMaxCells);
}

Plan::Plan(Placement placement, int num_microbatches, std::vector<Row> rows)
    : placement_(std::move(placement)),
      num_microbatches_(num_microbatches),
      rows_(std::move(rows)) {
    require_plan_size(num_stages(), num_microbatches_);
    if (rows_.size() != static_cast<std::size_t>(num_devices())) {
        throw std::invalid_argument("a plan for " + std::to_string(num_devices()) +
                                    " devices needs as many rows, got " +
                                    std::to_string(rows_.size()));
    }
}

std::size_t Plan::num_actions() const {
    std::size_t count = 0;
    for (const Row& row : rows_) count += row.size();
    return count;
}

Plan Plan::forward_only() const {
    std::vector<Row> rows(rows_.size());
    for (std::size_t device = 0; device < rows_.size(); ++device) {
        for (const Action& action : rows_[device]) {
            if (action.kind == Kind::F) rows[device].push_back(action);
        }
    }
    return {placement_, num_microbatches_, std::move(rows)};
}

}  // namespace pykern
