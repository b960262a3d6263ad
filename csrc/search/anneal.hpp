// Anneal: makes an order better by shifting single actions along their rows.
#pragma once

#include <cstdint>

#include "search/random.hpp"
#include "search/schedule.hpp"

namespace pykern {

struct Cooling {
    Ticks hottest;      // how much worse a change may make it at first, on average
    std::int64_t work;  // actions to time before it is cold
    Ticks target;       // stops when reached
};

// Anneals the loaded schedule and returns the best order seen, its makespan in `best`.
Order anneal(Schedule& schedule, Random& random, const Cooling& cooling, Ticks& best);

}  // namespace pykern
