#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "plan/check.hpp"
#include "plan/check_lowered.hpp"
#include "plan/generate.hpp"
#include "plan/lower.hpp"
#include "plan/text.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE(
    "every result that leaves its device has one copy, and what is lowered passes the check") {
    for (const int waves : {1, 2, 4}) {
        CAPTURE(waves);
        const Placement placement = Placement::wave(4, waves);
        const LoweredPlan lowered = lower(by_slots(placement, 12, 4, 16 * waves));
        check(lowered);
        std::size_t num_copies = 0;
        for (const Lane& lane : lowered.lanes) num_copies += lane.copies.size();
        // Both ways over each boundary but those where a wave turns.
        CHECK(num_copies == 2U * 12U * 3U * 2U * static_cast<unsigned>(waves));
    }
}

TEST_CASE("1F1B has a slot for each microbatch in flight, and for one input on its way") {
    const LoweredPlan lowered = lower(by_slots(Placement::linear(4), 16, 1, 2));
    std::vector<std::string> slots;
    for (const Ring& ring : rings_of(lowered)) {
        slots.push_back(std::to_string(ring.device) + ":" + std::to_string(ring.num_slots));
    }
    CHECK(slots == std::vector<std::string>{"0:4", "1:4", "2:3", "3:2"});
}

TEST_CASE("a slot that is taken too early is refused") {
    LoweredPlan lowered = lower(by_slots(Placement::linear(2), 4, 1, 2));
    std::optional<Action>& freed_by = lowered.lanes[0].copies[2].freed_by;
    REQUIRE(freed_by == Action{.microbatch = 0, .stage = 1, .kind = Kind::B});
    // By the last action before the one that frees it.
    freed_by = Action{.microbatch = 0, .stage = 1, .kind = Kind::F};
    CHECK_THROWS_AS(check(lowered), PlanError);
    freed_by.reset();
    CHECK_THROWS_AS(check(lowered), PlanError);
}

TEST_CASE("a copy that waits for an action behind which it may be needed is refused") {
    LoweredPlan lowered = lower(by_slots(Placement::linear(2), 4, 1, 2));
    std::optional<Action>& freed_by = lowered.lanes[0].copies[2].freed_by;
    const Plan& plan = lowered.plan;
    // The receiver has 1F2 at place 4, and what it needs must be under way at place 3.
    REQUIRE(to_text(plan.rows()[1][4]) == "1F2");
    freed_by = plan.rows()[1][2];
    CHECK_NOTHROW(check(lowered));
    freed_by = plan.rows()[1][3];
    CHECK_THROWS_AS(check(lowered), PlanError);
}

TEST_CASE("copies of other stages than the plan's are refused before they are looked up") {
    LoweredPlan lowered = lower(by_slots(Placement::linear(2), 4, 1, 2));
    lowered.lanes[0].copies[0].action.stage = 65535;
    CHECK_THROWS_AS(check(lowered), PlanError);
}
