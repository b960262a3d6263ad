#include "plan/plan.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plan/require.hpp"

namespace pykern {

namespace {

void require_pairs(const Overlaps& starts, std::size_t device, std::size_t row_size) {
    std::size_t free_from = 0;
    for (const std::size_t start : starts) {
        if (start < free_from || start + 1 >= row_size) {
            throw std::invalid_argument(
                "overlaps of device " + std::to_string(device) +
                " must ascend, leave room for the second action of a pair, and stay in a row of " +
                std::to_string(row_size) + ", got position " + std::to_string(start));
        }
        free_from = start + 2;
    }
}

}  // namespace

std::size_t slot_start(const Overlaps& overlaps, std::size_t position) {
    const bool second = position > 0 && std::ranges::binary_search(overlaps, position - 1);
    return position - (second ? 1 : 0);
}

void require_plan_size(int num_stages, int num_microbatches, int num_slices) {
    require_range("num_microbatches", num_microbatches, 1, kMaxCells);
    require_range("num_slices", num_slices, 1, kMaxSlices);
    require_range("num_stages * num_microbatches * num_slices",
                  std::int64_t{num_stages} * num_microbatches * num_slices, 1, kMaxCells);
}

Plan::Plan(Placement placement, int num_microbatches, std::vector<Row> rows, int num_slices,
           std::vector<Overlaps> overlaps)
    : placement_(std::move(placement)),
      num_microbatches_(num_microbatches),
      num_slices_(num_slices),
      rows_(std::move(rows)),
      overlaps_(std::move(overlaps)) {
    require_plan_size(num_stages(), num_microbatches_, num_slices_);
    if (rows_.size() != static_cast<std::size_t>(num_devices())) {
        throw std::invalid_argument("rows must be " + std::to_string(num_devices()) +
                                    ", one for each device, got " + std::to_string(rows_.size()));
    }
    if (overlaps_.empty()) overlaps_.resize(rows_.size());
    if (overlaps_.size() != rows_.size()) {
        throw std::invalid_argument("overlaps must hold a list for each of " +
                                    std::to_string(rows_.size()) + " rows, got " +
                                    std::to_string(overlaps_.size()));
    }
    for (std::size_t device = 0; device < rows_.size(); ++device) {
        require_pairs(overlaps_[device], device, rows_[device].size());
    }
}

std::size_t Plan::num_actions() const {
    std::size_t count = 0;
    for (const Row& row : rows_) count += row.size();
    return count;
}

bool Plan::has(Kind kind) const {
    const auto is_kind = [kind](const Action& action) { return action.kind == kind; };
    return std::ranges::any_of(rows_,
                               [&](const Row& row) { return std::ranges::any_of(row, is_kind); });
}

int Plan::first_trained() const {
    int first = num_stages();
    for (const Row& row : rows_) {
        for (const Action& action : row) {
            if (first == 0) return first;
            const bool is_backward =
                action.kind == Kind::B || action.kind == Kind::I || action.kind == Kind::W;
            if (is_backward) first = std::min(first, int{action.stage});
        }
    }
    return first;
}

Plan Plan::forward_only() const {
    std::vector<Row> rows(rows_.size());
    for (std::size_t device = 0; device < rows_.size(); ++device) {
        for (const Action& action : rows_[device]) {
            if (action.kind == Kind::F) rows[device].push_back(action);
        }
    }
    return {placement_, num_microbatches_, std::move(rows), num_slices_};
}

std::size_t hash_of(const Plan& plan) {
    static_assert(std::has_unique_object_representations_v<Action>);
    auto hash = static_cast<std::size_t>(plan.num_microbatches());
    for (const Row& row : plan.rows()) {
        const std::string_view bytes(reinterpret_cast<const char*>(row.data()),
                                     row.size() * sizeof(Action));
        hash = hash * 31 + std::hash<std::string_view>{}(bytes);
    }
    return hash;
}

}  // namespace pykern
