#include <doctest/doctest.h>

#include <stdexcept>
#include <vector>

#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plan/simulate.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("transfers delay the reader and block nobody") {
    const Plan plan = plan_of(Placement::linear(2), 2, {"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"});
    const Timeline timeline = simulate(plan, Costs(1.0, 2.0, 0.5));
    const std::vector<Span> expected = {{{0, 1, Kind::F}, 1.5, 2.5},
                                        {{0, 1, Kind::B}, 2.5, 4.5},
                                        {{1, 1, Kind::F}, 4.5, 5.5},
                                        {{1, 1, Kind::B}, 5.5, 7.5}};
    CHECK(timeline.rows()[1] == expected);
    CHECK(timeline.rows()[0][2] == Span{{0, 0, Kind::B}, 5, 7});
    CHECK(timeline.makespan_ns() == 10);
    CHECK(timeline.peak_in_flight(0) == 2);
    CHECK(timeline.peak_in_flight(1) == 1);
}

TEST_CASE("each stage has its own times") {
    const Plan plan = plan_of(Placement(1, {0, 0}), 1, {"0F0 1F0 1B0 0B0"});
    const Timeline timeline =
        simulate(plan, Costs(std::vector<double>{1, 2}, std::vector<double>{4, 8}));
    CHECK(timeline.makespan_ns() == 15);
    CHECK(timeline.bubble_ratio() == 0);
    CHECK_THROWS_AS(simulate(plan, Costs(std::vector<double>{1}, 1.0)), std::invalid_argument);
}

TEST_CASE("a plan that cannot run is refused") {
    const Plan plan = plan_of(Placement::linear(1), 1, {"0B0 0F0"});
    CHECK_THROWS_AS(simulate(plan, Costs(1.0, 1.0)), PlanError);
}
