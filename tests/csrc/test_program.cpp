#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "exec/program.hpp"
#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("a program counts the row and the inputs of each action, once") {
    // 1B0 needs 1F0, which is also the action before it in the row.
    const Program program(plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"}));
    CHECK(program.num_devices() == 2);
    CHECK(program.num_actions() == 4);
    const std::vector<int> expected{0, 2, 1, 1};
    for (Position position = 0; position < 4; ++position) {
        CHECK(program.num_inputs(position) == expected[position]);
    }
    const auto released = program.releases(0);
    CHECK(std::vector<Position>(released.begin(), released.end()) == std::vector<Position>{1, 2});
}

TEST_CASE("rows lie one behind the other") {
    const Program program(plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"}));
    CHECK(program.device_of(1) == 0);
    CHECK(program.device_of(2) == 1);
    CHECK(program.row_begin(1) == 2);
    CHECK(program.row_begin(2) == 4);
}

TEST_CASE("every input is released exactly once") {
    const Program program(Plan(by_slots(Placement::wave(3, 2), 7, 3, 24)));
    std::vector<int> released(program.num_actions(), 0);
    for (Position position = 0; position < program.num_actions(); ++position) {
        for (const Position next : program.releases(position)) ++released[next];
    }
    for (Position position = 0; position < program.num_actions(); ++position) {
        CHECK(released[position] == program.num_inputs(position));
    }
}

TEST_CASE("a plan that cannot run makes no program") {
    CHECK_THROWS_AS(Program(plan_of(Placement::linear(1), 1, {"0B0 0F0"})), PlanError);
}

TEST_CASE("R waits for its F, and B for its R") {
    const Program program(
        plan_of(Placement::linear(2), 2, {"0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"}));
    CHECK(program.held()[static_cast<std::size_t>(Kind::R)]);
    const std::vector<int> expected{0, 1, 2, 3, 2, 3, 1, 1, 2, 1};
    for (Position position = 0; position < program.num_actions(); ++position) {
        CAPTURE(position);
        CHECK(program.num_inputs(position) == expected[position]);
    }
}

TEST_CASE("a program knows its kinds, and whose stage an action is of") {
    const Program program(plan_of(Placement::bidirectional(2), 2,
                                  {"0F0 1F1 0I0 1B1 0W0 0REDUCE0", "0F1 1F0 1B0 0B1 1REDUCE0"}));
    CHECK(program.held()[static_cast<std::size_t>(Kind::W)]);
    CHECK(program.held()[static_cast<std::size_t>(Kind::REDUCE)]);
    CHECK_FALSE(program.held()[static_cast<std::size_t>(Kind::U)]);
    CHECK(program.stage_of_replica(0) == 0);  // 0F0
    CHECK(program.stage_of_replica(1) == 3);  // 1F1, of the second replica
    CHECK(program.stage_of_replica(6) == 2);  // 0F1
    CHECK(program.stage_of_replica(7) == 1);  // 1F0
    CHECK(program.num_inputs(4) == 2);        // 0W0 waits for its I and its row
    CHECK(program.num_inputs(5) == 2);        // 0REDUCE waits for 0B1 and its row
}
