#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plan/range_max.hpp"
#include "plan/recompute.hpp"
#include "plan/simulate.hpp"

using namespace pykern;

TEST_CASE("the greatest of a range is that of the numbers themselves") {
    // The same in every run.
    std::minstd_rand random(1);  // NOLINT(bugprone-random-generator-seed)
    const auto below = [&](std::size_t count) { return random() % count; };
    for (const std::size_t size : {1U, 2U, 7U, 64U, 100U}) {
        CAPTURE(size);
        std::vector<double> values(size);
        for (double& value : values) value = static_cast<double>(below(50));
        RangeMax ranges(values);
        for (int step = 0; step < 200; ++step) {
            const std::size_t from = below(size);
            const std::size_t to = from + below(size - from + 1);
            const double amount = static_cast<double>(below(9)) - 4;
            ranges.add(from, to, amount);
            double greatest = -std::numeric_limits<double>::infinity();
            for (std::size_t i = from; i < to; ++i) {
                values[i] += amount;
                greatest = std::max(greatest, values[i]);
            }
            REQUIRE(ranges.max(from, to) == greatest);
            REQUIRE(ranges.max(0, size) == *std::ranges::max_element(values));
        }
    }
    CHECK(RangeMax({}).max(0, 0) == -std::numeric_limits<double>::infinity());
}

TEST_CASE("a cell holds what R rebuilds, where nothing else is said as much as without R") {
    const Plan plan = by_phases(Placement::linear(2), 4, std::vector<int>(2, 4), 4);
    const std::vector<Action> cells = {make_action(Kind::R, 0, 0)};
    const Memory alike(8.0, 8.0, 1.0);
    const Memory less(8.0, 8.0, 1.0, 3.0);
    CHECK(alike == Memory(8.0, 8.0, 1.0, 8.0));
    CHECK(!(alike == less));
    const Plan recomputed = with_recompute(plan, cells, Costs(1.0, 2.0), less, 0.0);
    CHECK(peak_bytes(recomputed, alike)[0] == 32.0);
    CHECK(peak_bytes(recomputed, less)[0] == 27.0);
}

TEST_CASE("a hundred thousand actions, half of a row ahead of their backwards, are planned") {
    const int num_microbatches = 12500;
    const Plan plan = by_phases(Placement::linear(4), num_microbatches,
                                std::vector<int>(4, num_microbatches), num_microbatches);
    std::vector<Action> cells;
    for (int stage = 0; stage < 4; ++stage) {
        for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
            cells.push_back(make_action(Kind::R, stage, microbatch));
        }
    }
    const Memory memory(8.0, 8.0, 1.0);
    const Plan recomputed = with_recompute(plan, cells, Costs(1.0, 2.0), memory, 20000);
    CHECK(recomputed.num_actions() == plan.num_actions() + cells.size());
    check_memory(recomputed, memory, 20000);
}
