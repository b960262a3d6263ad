// RangeMax: numbers in a row, of which any range can be raised, and its greatest asked for, in
// logarithmic time.
#pragma once

#include <cstddef>
#include <vector>

namespace pykern {

class RangeMax {
   public:
    explicit RangeMax(const std::vector<double>& values);

    // Adds to the values in [from, to).
    void add(std::size_t from, std::size_t to, double amount);
    // The greatest in [from, to), or minus infinity where that is empty.
    double max(std::size_t from, std::size_t to) const;

   private:
    // A node of the tree and the positions below it. Its halves are those of its children.
    struct Range {
        std::size_t node;
        std::size_t begin;
        std::size_t end;

        std::size_t middle() const { return begin + (end - begin) / 2; }
        Range left() const { return {2 * node, begin, middle()}; }
        Range right() const { return {2 * node + 1, middle(), end}; }
    };
    Range all() const { return {1, 0, size_}; }

    void build(Range range, const std::vector<double>& values);
    void add(Range range, std::size_t from, std::size_t to, double amount);
    double max(Range range, std::size_t from, std::size_t to) const;

    std::size_t size_;
    // By node: the greatest below it, and what was added to all below it but not to its children.
    std::vector<double> greatest_;
    std::vector<double> added_;
};

}  // namespace pykern
