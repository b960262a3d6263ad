#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plans.hpp"

using namespace pykern;

namespace {

struct Refused {
    const char* rule;
    int device;
    std::size_t position;
    std::vector<std::string> rows;
};

}  // namespace

TEST_CASE("each rule is told apart, with its place") {
    const std::vector<Refused> cases = {
        {"P001", 1, 1, {"0F0 0B0", "1F0 2B0"}},
        {"P001", 0, 0, {"0F1 0B0", "1F0 1B0"}},
        {"P002", 0, 1, {"0F0 0W0 0B0", "1F0 1B0"}},
        {"P003", 1, 2, {"0F0 0B0", "1F0 1B0 0F0"}},
        {"P004", 0, 1, {"0F0 1F0 0B0", "1B0"}},
        {"P005", 1, 1, {"0F0 0B0", "1F0"}},
        {"P005", 0, 0, {"", ""}},
        {"P006", 1, 0, {"0F0 0B0", "1B0 1F0"}},
    };
    for (const Refused& refused : cases) {
        CAPTURE(refused.rule);
        const Plan plan = plan_of(Placement::linear(2), 1, refused.rows);
        try {
            check(plan);
            FAIL("accepted");
        } catch (const PlanError& error) {
            CHECK(std::string(error.rule()) == refused.rule);
            CHECK(error.device() == refused.device);
            CHECK(error.position() == refused.position);
        }
    }
}

TEST_CASE("a deadlock between devices is refused") {
    const Plan plan = plan_of(Placement(2, {0, 1, 0}), 2, {"2F0 0F0 0F1 2F1", "1F0 1F1"});
    CHECK_THROWS_AS(check(plan), PlanError);
}

TEST_CASE("generated plans pass, forwards alone too") {
    const Plan plan = by_slots(Placement::wave(3, 2), 7, 3, 24);
    CHECK_NOTHROW(check(plan));
    CHECK_NOTHROW(check(plan.forward_only()));
}
