#include <doctest/doctest.h>

#include <stdexcept>
#include <string>

#include "plan/text.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("every kind writes and reads the same") {
    for (int kind = 0; kind < kNumKinds; ++kind) {
        for (const int stage : {0, 7, 65535}) {
            const Action action = make_action(static_cast<Kind>(kind), stage, 4294967295);
            CHECK(parse_action(to_text(action)) == action);
        }
    }
}

TEST_CASE("only the whole, canonical text is an action") {
    for (const char* text :
         {"", "F", "2F", "F0", "02F0", "2F00", "2f0", "2F0 ", "2F-1", "2", "2F0F1", "2FF0",
          "65536F0", "0F4294967296", "99999999999999999999F0"}) {
        CAPTURE(text);
        CHECK_THROWS_AS(parse_action(text), std::invalid_argument);
    }
    CHECK_THROWS_AS(parse_action(std::string("2F0\0", 4)), std::invalid_argument);
}

TEST_CASE("the arrow stands under the place, also at a row's end") {
    const Plan plan = plan_of(Placement::linear(2), 1, {"0F0 0B0", ""});
    CHECK(table_at(plan, 0, 1) ==
          "device 0 | 0F0 0B0\n"
          "               ^ here\n"
          "device 1 |");
    CHECK(table_at(plan, 1, 0) ==
          "device 0 | 0F0 0B0\n"
          "device 1 |\n"
          "           ^ here");
}
