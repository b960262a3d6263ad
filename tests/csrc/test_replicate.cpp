#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "plan/check.hpp"
#include "plan/reduce.hpp"
#include "plan/replicate.hpp"
#include "plan/updates.hpp"
#include "plans.hpp"
#include "plans_of_all_forms.hpp"

using namespace pykern;

TEST_CASE("blocks stand side by side, and one with fewer leaves out the last") {
    const Plan plan = by_slots(Placement::linear(2), 2, 1, 2);
    CHECK(with_replicas(plan, 1, 2) == plan);
    CHECK(with_replicas(plan, 2, 3) ==
          plan_of(Placement(4, std::vector<Replica>{{0, 1}, {2, 3}}), 3,
                  {"0F0 0F2 0B0 0B2", "1F0 1B0 1F2 1B2", "0F1 0B1", "1F1 1B1"}));
}

TEST_CASE("a plan of several replicas gives each block as many") {
    const Plan both = by_slots(Placement::bidirectional(2), 2, 1, 4);
    const Plan plan = with_replicas(both, 2, 4);
    CHECK(plan.placement() == Placement(4, std::vector<Replica>{{0, 1}, {2, 3}, {1, 0}, {3, 2}}));
    for (int device = 0; device < 4; ++device) {
        for (const Action& action : plan.rows()[static_cast<std::size_t>(device)]) {
            CHECK(plan.device_of(action) == device);
        }
    }
}

TEST_CASE("a pair that loses one of its actions is none any more") {
    const Plan plan = overlapped();
    const Plan replicated = with_replicas(plan, 2, 7);
    for (std::size_t device = 0; device < 2; ++device) {
        CHECK(replicated.overlaps()[device] == plan.overlaps()[device]);
        CHECK(replicated.overlaps()[2 + device].size() < plan.overlaps()[device].size());
    }
}

TEST_CASE("plans of all forms can run in blocks") {
    for (const NamedPlan& named : plans_of_all_forms()) {
        CAPTURE(named.name);
        const std::int64_t count = named.plan.num_microbatches();
        if (named.plan.has(Kind::REDUCE)) {
            CHECK_THROWS_AS(with_replicas(named.plan, 2, 2 * count), std::invalid_argument);
            continue;
        }
        for (const int less : {0, 1, 2}) {
            CHECK_NOTHROW(check(with_reductions(with_replicas(named.plan, 3, 3 * count - less))));
        }
    }
}

TEST_CASE("counts that do not fit are refused before anything is allocated") {
    const Plan plan = by_slots(Placement::linear(2), 2, 1, 2);
    const std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (const std::int64_t count : {-most, std::int64_t{2}, std::int64_t{5}, most}) {
        CAPTURE(count);
        CHECK_THROWS_AS(with_replicas(plan, 2, count), std::invalid_argument);
    }
    for (const int num_replicas : {-1, 0, 40000, 65537, std::numeric_limits<int>::max()}) {
        CAPTURE(num_replicas);
        CHECK_THROWS_AS(with_replicas(plan, num_replicas, std::int64_t{2} * num_replicas),
                        std::invalid_argument);
    }
    const Plan updated = with_updates(plan, 1, 0);
    CHECK_THROWS_AS(with_replicas(updated, 2, 4), std::invalid_argument);
}
