// Order: a row of symbols per device, the form in which the search holds plans.
#pragma once

#include <optional>
#include <vector>

#include "plan/plan.hpp"
#include "search/problem.hpp"

namespace pykern {

using Symbols = std::vector<Symbol>;

struct Order {
    std::vector<Symbols> rows;

    friend bool operator==(const Order&, const Order&) = default;
};

// A symbol with the microbatch that it is about.
struct Labelled {
    Symbol symbol;
    std::uint32_t microbatch;

    friend bool operator==(const Labelled&, const Labelled&) = default;
};

// Counts off a row, first in, first out; the j-th W belongs to the j-th I. False where a stage has
// not each microbatch's F and, behind it, backward once, or not a W behind each I, and where an F
// is behind something else although forwards come first.
bool label(const Problem& problem, std::size_t device, const Symbols& row,
           std::vector<Labelled>& labelled);

// Nothing where the plan holds kinds that the search does not know.
std::optional<Order> order_of(const Plan& plan);
Plan plan_of(const Problem& problem, const Placement& placement, const Order& order);

}  // namespace pykern
