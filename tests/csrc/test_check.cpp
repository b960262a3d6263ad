#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plans.hpp"

using namespace pykern;

namespace {

// Rule, device and position of the error, or "accepted".
std::string verdict(const Plan& plan) {
    try {
        check(plan);
        return "accepted";
    } catch (const PlanError& error) {
        return std::string(error.rule()) + " " + std::to_string(error.device()) + " " +
               std::to_string(error.position());
    }
}

}  // namespace

TEST_CASE("each rule is told apart, with its place") {
    const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
        {"accepted", {"0F0 0B0", "1F0 1B0"}},     {"P001 1 1", {"0F0 0B0", "1F0 2B0"}},
        {"P001 0 0", {"0F1 0B0", "1F0 1B0"}},     {"P002 0 1", {"0F0 0COPY_F0 0B0", "1F0 1B0"}},
        {"P003 1 2", {"0F0 0B0", "1F0 1B0 0F0"}}, {"P004 0 1", {"0F0 1F0 0B0", "1B0"}},
        {"P005 1 1", {"0F0 0B0", "1F0"}},         {"P005 0 0", {"", ""}},
        {"P006 1 0", {"0F0 0B0", "1B0 1F0"}},
    };
    for (const auto& [expected, rows] : cases) {
        CHECK(verdict(plan_of(Placement::linear(2), 1, rows)) == expected);
    }
}

TEST_CASE("a deadlock between devices is refused") {
    const Plan plan = plan_of(Placement(2, {0, 1, 0}), 2, {"2F0 0F0 0F1 2F1", "1F0 1F1"});
    CHECK(verdict(plan) == "P007 0 0");
}

TEST_CASE("generated plans pass, forwards alone too") {
    const Plan plan = by_slots(Placement::wave(3, 2), 7, 3, 24);
    CHECK(verdict(plan) == "accepted");
    CHECK(verdict(plan.forward_only()) == "accepted");
}
