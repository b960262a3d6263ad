#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

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
    const auto refused = [](const std::string& text) {
        try {
            parse_action(text);
            return false;
        } catch (const std::invalid_argument&) {
            return true;
        }
    };
    const std::vector<std::string> texts = {
        "",     "F", "2F",    "F0",   "02F0", "2F00",    "2f0",          "2F0 ",
        "2F-1", "2", "2F0F1", "2FF0", "2F0",  "65536F0", "0F4294967296", "99999999999999999999F0"};
    for (const std::string& text : texts) {
        CAPTURE(text);
        CHECK(refused(text) == (text != "2F0"));
    }
    CHECK(refused(std::string("2F0\0", 4)));
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
