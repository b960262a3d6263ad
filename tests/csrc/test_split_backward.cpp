#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "plan/by_block.hpp"
#include "plan/by_program.hpp"
#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plan/memory.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("weights follow their input gradients by the delay") {
    const Plan plan = by_phases(Placement::linear(2), 3, {1, 0}, 3, {0, 1});
    CHECK(plan ==
          plan_of(Placement::linear(2), 3,
                  {"0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"}));
    CHECK_THROWS_AS(by_phases(Placement::linear(2), 3, {1, 0}, 3, {0}), std::invalid_argument);
}

TEST_CASE("a program leaves out what its plan is too short for") {
    const std::vector<std::vector<Phase>> programs{{{5, "F0 F1"}, {5, "F0&I1 I0 W"}, {9, "W0 W1"}}};
    for (const int num_microbatches : {1, 2, 5}) {
        CAPTURE(num_microbatches);
        const Plan plan = by_program(Placement(1, Replica{0, 0}), num_microbatches, programs);
        CHECK(plan.num_actions() == static_cast<std::size_t>(6 * num_microbatches));
        CHECK(plan.overlaps()[0].empty());
    }
    CHECK_THROWS_AS(by_program(Placement::linear(1), 1, {{{1, "F0 B1"}}}), std::invalid_argument);
}

TEST_CASE("a block is squeezed within its own peak") {
    // V-Min, whose peak is a third of the stages.
    for (const int num_devices : {1, 2, 4, 5, 7, 8}) {
        std::vector<int> forward_slots;
        std::vector<int> input_slots;
        for (int stage = 0; stage < 2 * num_devices; ++stage) {
            forward_slots.push_back(stage);
            input_slots.push_back(4 * num_devices - 1 - stage);
        }
        for (const int num_microbatches : {1, 2, 9, 40}) {
            CAPTURE(num_devices);
            CAPTURE(num_microbatches);
            const Plan plan = by_block(Placement::wave(num_devices, 1), num_microbatches,
                                       forward_slots, input_slots, 6);
            const double peak = std::ranges::max(peak_bytes(plan, Memory(1.0, 1.0)));
            CHECK(peak <= 2 * ((num_devices + 4) / 3));
        }
    }
    CHECK_THROWS_AS(by_block(Placement::linear(1), 2, {0}, {1}, 1), std::invalid_argument);
}
