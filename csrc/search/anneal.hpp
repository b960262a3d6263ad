// Anneal: makes an order better by shifting single actions along their rows.
#pragma once

#include <cstdint>
#include <functional>

#include "search/random.hpp"
#include "search/schedule.hpp"

namespace pykern {

// Called every few milliseconds; what it throws ends the search.
using Poll = std::function<void()>;

struct Cooling {
    Ticks hottest;      // how much worse a change may make it at first, on average
    std::int64_t work;  // actions to time before it is cold
    Ticks target;       // stops when reached
};

// Anneals the loaded schedule and returns the best order seen, its makespan in `best`.
Order anneal(Schedule& schedule, Random& random, const Cooling& cooling, const Poll& poll,
             Ticks& best);

}  // namespace pykern
