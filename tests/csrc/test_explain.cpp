#include <doctest/doctest.h>

#include <stdexcept>
#include <vector>

#include "plan/explain.hpp"
#include "plan/generate.hpp"
#include "plan/simulate.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("a critical path has no gap but its transfers") {
    const Plan plan = by_slots(Placement::wave(3, 2), 9, 3, 24);
    const Costs costs(3.0, 5.0, 0.5);
    const std::vector<Step> path = critical_path(plan, costs);
    CHECK(path.front().span.start_ns == 0);
    CHECK(path.back().span.end_ns == simulate(plan, costs).makespan_ns());
    for (std::size_t i = 1; i < path.size(); ++i) {
        const double transfer_ns = path[i].wait == Wait::TRANSFER ? 0.5 : 0;
        CHECK(path[i].span.start_ns == path[i - 1].span.end_ns + transfer_ns);
    }
}

TEST_CASE("a device that never works idles all the time") {
    const Plan plan = plan_of(Placement(2, Replica{1}), 1, {"", "0F0 0B0"});
    const std::vector<Bubble> expected = {{.before_first_ns = 3}, {}};
    CHECK(bubbles(plan, Costs(1.0, 2.0)) == expected);
}

TEST_CASE("messages over one link queue in the order of the sender's row") {
    const Plan plan = plan_of(Placement::linear(2), 2, {"0F1 0F0", "1F1 1F0"});
    const Costs costs(CostTable{.forward_ns = 1.0,
                                .backward_ns = 1.0,
                                .message_bytes = 4.0,
                                .bandwidth = 1,
                                .shared_links = true});
    CHECK(simulate(plan, costs).rows()[1][1].start_ns == 9);
}

TEST_CASE("a measured step is explained by its own times") {
    const Plan plan = plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"});
    const Timeline simulated = simulate(plan, Costs(3.0, 5.0));
    std::vector<std::vector<Span>> rows = simulated.rows();
    // 1B0 begins 2 late, though its input is there, and 0B0 another 1 after it has ended.
    rows[1][1].start_ns += 2;
    rows[1][1].end_ns += 2;
    rows[0][1].start_ns += 3;
    rows[0][1].end_ns += 3;
    const Timeline measured(rows);
    const std::vector<Bubble> expected = {
        {.compute_ns = 10, .transfer_ns = 1},
        {.before_first_ns = 3, .after_last_ns = 6, .issue_ns = 2},
    };
    CHECK(bubbles(plan, measured) == expected);
    const std::vector<Step> path = critical_path(plan, measured);
    CHECK(path.size() == 4);
    CHECK(path[1].wait == Wait::INPUT);
    CHECK(path[2].wait == Wait::ROW);
    CHECK(path[3].wait == Wait::TRANSFER);
    CHECK_THROWS_AS(bubbles(plan, Timeline({rows[0], {}})), std::invalid_argument);
}
