#include "plan/range_max.hpp"

#include <algorithm>
#include <limits>

namespace pykern {

RangeMax::RangeMax(const std::vector<double>& values)
    : size_(values.size()), greatest_(4 * size_ + 2, 0), added_(4 * size_ + 2, 0) {
    if (size_ > 0) build(all(), values);
}

void RangeMax::add(std::size_t from, std::size_t to, double amount) {
    if (from < to) add(all(), from, to, amount);
}

double RangeMax::max(std::size_t from, std::size_t to) const {
    return from < to ? max(all(), from, to) : -std::numeric_limits<double>::infinity();
}

void RangeMax::build(Range range, const std::vector<double>& values) {
    if (range.end - range.begin == 1) {
        greatest_[range.node] = values[range.begin];
        return;
    }
    build(range.left(), values);
    build(range.right(), values);
    greatest_[range.node] = std::max(greatest_[range.left().node], greatest_[range.right().node]);
}

void RangeMax::add(Range range, std::size_t from, std::size_t to, double amount) {
    if (to <= range.begin || range.end <= from) return;
    if (from <= range.begin && range.end <= to) {
        greatest_[range.node] += amount;
        added_[range.node] += amount;
        return;
    }
    add(range.left(), from, to, amount);
    add(range.right(), from, to, amount);
    greatest_[range.node] =
        added_[range.node] + std::max(greatest_[range.left().node], greatest_[range.right().node]);
}

double RangeMax::max(Range range, std::size_t from, std::size_t to) const {
    if (to <= range.begin || range.end <= from) return -std::numeric_limits<double>::infinity();
    if (from <= range.begin && range.end <= to) return greatest_[range.node];
    return added_[range.node] + std::max(max(range.left(), from, to), max(range.right(), from, to));
}

}  // namespace pykern
