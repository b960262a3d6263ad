#include "plan/index.hpp"

namespace pykern {

Index::Index(const Plan& plan)
    : num_stages_(plan.num_stages()),
      num_microbatches_(plan.num_microbatches()),
      num_slices_(plan.num_slices()) {
    const std::size_t num_cells = static_cast<std::size_t>(num_stages_) *
                                  static_cast<std::size_t>(num_microbatches_) *
                                  static_cast<std::size_t>(num_slices_);
    int position = 0;
    for (const Row& row : plan.rows()) {
        row_starts_.push_back(position);
        for (const Action& action : row) {
            std::vector<std::int32_t>& positions = positions_[kind_of(action)];
            if (positions.empty()) positions.assign(num_cells, -1);
            std::int32_t& entry = positions[cell_of(action)];
            if (entry < 0) entry = position;
            ++position;
        }
    }
    row_starts_.push_back(position);
}

}  // namespace pykern
