#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "plan/generate.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/order.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("the index finds every action and nothing else") {
    const Plan plan = plan_of(Placement::linear(2), 2, {"0F1 0F0", "1F0 1F1"});
    const Index index(plan);
    CHECK(index.at({1, 0, Kind::F}) == 0);
    CHECK(index.at({0, 0, Kind::F}) == 1);
    CHECK(index.at({1, 1, Kind::F}) == 3);
    CHECK(index.at({1, 1, Kind::B}) == -1);
    CHECK(index.row_start(1) == 2);
    CHECK(index.has(Kind::F));
    CHECK_FALSE(index.has(Kind::B));
}

namespace {

// True where each row runs in its order and each action after its inputs.
bool respects_plan(const std::vector<Action>& order, const Plan& plan, const Index& index) {
    std::vector<bool> ran(order.size(), false);
    std::vector<int> next(plan.rows().size());
    for (std::size_t i = 0; i < next.size(); ++i) next[i] = index.row_start(static_cast<int>(i));
    for (const Action& action : order) {
        bool inputs_ran = true;
        for_each_input(action, index, [&](Action, int position) {
            inputs_ran = inputs_ran && ran[static_cast<std::size_t>(position)];
        });
        if (!inputs_ran) return false;
        const int device = plan.device_of(action);
        if (index.at(action) != next[static_cast<std::size_t>(device)]++) return false;
        ran[static_cast<std::size_t>(index.at(action))] = true;
    }
    return true;
}

}  // namespace

TEST_CASE("the order keeps rows and puts inputs first") {
    for (const int num_devices : {1, 2, 3, 5}) {
        CAPTURE(num_devices);
        const Plan plan =
            by_slots(Placement::wave(num_devices, 2), 6, num_devices, 8 * num_devices);
        const Index index(plan);
        const std::vector<Action> order = run_order(plan, index);
        CHECK(order.size() == plan.num_actions());
        CHECK(respects_plan(order, plan, index));
    }
}

TEST_CASE("a deadlock ends the order where each row stops") {
    const Plan plan = plan_of(Placement(2, {0, 1, 0}), 1, {"2F0 0F0", "1F0"});
    CHECK(run_order(plan, Index(plan)).empty());
}
