// Search: the best plan over placements, never worse than the plans that it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan/plan.hpp"
#include "search/anneal.hpp"
#include "search/problem.hpp"

namespace pykern {

// A millisecond of a search's budget is this many actions timed, which is what one core of a 2020s
// server does. The search counts them and never looks at a clock, so that it finds the same plan on
// every machine.
inline constexpr std::int64_t kWorkPerMs = 75'000;

// A plan to start from, and the candidate whose placement it has.
struct Seed {
    std::size_t candidate;
    Plan plan;
};

struct SearchResult {
    Plan plan;
    double makespan_ns;
    double bound_ns;                        // no order of any candidate takes less
    bool proven;                            // the makespan is the bound
    std::vector<double> seed_makespans_ns;  // infinite for a seed that breaks the cap
    std::vector<double> peaks;              // per device, in the unit of the caps
    std::int64_t work;                      // actions timed
};

// How much to do, with which random choices, and what to call now and then; it may throw to end the
// search.
struct Effort {
    double budget_ms;
    std::uint64_t random_seed;
    Poll poll;
};

// Throws std::invalid_argument where a number makes no sense or no candidate fits under the caps.
SearchResult search(const std::vector<Candidate>& candidates, int num_microbatches,
                    const std::vector<double>& caps, const std::vector<Seed>& seeds,
                    const Effort& effort);

}  // namespace pykern
