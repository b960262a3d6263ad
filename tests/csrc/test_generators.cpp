#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <vector>

#include "plan/by_list.hpp"
#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plan/slot_lane.hpp"
#include "plan/updates.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("the lattice lays out replicas, units and slices") {
    for (const int num_microbatches : {1, 2, 5, 8, 17}) {
        CAPTURE(num_microbatches);
        const Placement both = Placement::bidirectional(4);
        CHECK(by_slots(both, num_microbatches, 2, 8).num_actions() ==
              static_cast<std::size_t>(8 * num_microbatches));
        CHECK_NOTHROW(by_slots(both, num_microbatches, 2, 8, 2));
        CHECK_NOTHROW(by_slots(Placement::linear(3), num_microbatches, 1, 8, 1, 4));
    }
}

TEST_CASE("list scheduling starts forwards as early as the cap lets it") {
    const Plan order = by_slots(Placement::linear(2), 3, 1, 2);
    const Plan expected =
        plan_of(Placement::linear(2), 3, {"0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"});
    CHECK(by_list(order, 3) == expected);
    CHECK(by_list(order, 1).rows()[1] == order.rows()[1]);
    CHECK_NOTHROW(by_list(by_slots(Placement::wave(3, 2), 7, 3, 12), 12));
    CHECK_THROWS_AS(by_list(by_slots(Placement::wave(2, 1), 2, 2, 8), 1), std::invalid_argument);
}

TEST_CASE("updates stand where the delay puts them, and versions follow") {
    const Plan order = by_slots(Placement::linear(2), 4, 1, 2);
    const Plan at_once = with_updates(order, 1, 0);
    CHECK(at_once.rows()[1] ==
          plan_of(Placement::linear(1), 4, {"1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3"})
              .rows()[0]);
    CHECK(weight_versions(at_once) == std::vector<int>{2, 1});
    CHECK(weight_versions(with_updates(order, 2, 2)) == std::vector<int>{1, 1});
    CHECK_THROWS_AS(with_updates(order, 1, 1), PlanError);
}

namespace {

// The Ws that wait in front of each slot, and the peak, as a walk along all slots finds them.
struct Walked {
    std::vector<int> waiting;
    int peak = 0;
};

Walked walked(const SlotLane& lane, std::size_t num_slots) {
    Walked found;
    int waiting = 0;
    int in_flight = 0;
    for (std::size_t slot = 0; slot < num_slots; ++slot) {
        found.waiting.push_back(waiting);
        const Action action = lane.at(slot);
        if (action.kind == Kind::F) ++in_flight;
        found.peak = std::max(found.peak, in_flight);
        if (action.kind == Kind::I) ++waiting;
        if (action.kind != Kind::W || waiting == 0) continue;
        --waiting;
        --in_flight;
    }
    return found;
}

}  // namespace

TEST_CASE("the sums of a lane are those of a walk along its slots, also after moves") {
    std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed)
    for (const int size : {1, 5, 64, 65, 200, 700}) {
        const auto num_slots = static_cast<std::size_t>(size);
        CAPTURE(num_slots);
        SlotLane lane(num_slots);
        std::size_t forwards = 0;
        for (std::size_t slot = 0; slot < num_slots; ++slot) {
            const auto choice = random() % 3;
            if (choice == 0) {
                lane.put(slot, make_action(Kind::F, 0, static_cast<std::int64_t>(forwards++)));
            }
            if (choice == 1 && forwards > 0) {
                lane.put(slot,
                         make_action(Kind::I, 0, static_cast<std::int64_t>(random() % forwards)));
            }
        }
        lane.settle();
        for (int tries = 0; tries < 300; ++tries) {
            const Walked now = walked(lane, num_slots);
            REQUIRE(lane.peak() == now.peak);
            const std::size_t from = random() % num_slots;
            const std::size_t to = random() % (from + 1);
            REQUIRE(lane.is_idle(to) == (lane.is_free(to) && now.waiting[to] == 0));
            if (lane.is_free(from) || !lane.is_free(to)) continue;
            SlotLane moved = lane;
            REQUIRE(moved.move(from, to, 1 << 20));
            const int peak = walked(moved, num_slots).peak;
            REQUIRE(lane.move(from, to, now.peak) == (peak <= now.peak));
        }
    }
}
