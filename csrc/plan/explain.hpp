// Explain: why a plan takes the time that the simulator says, or that a step has taken.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/costs.hpp"
#include "plan/plan.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// The idle time of one device. The parts add up to makespan minus busy time.
struct Bubble {
    double before_first_ns = 0;
    double after_last_ns = 0;
    // Between two actions: until the input that came last was computed on its device, and from
    // then until it was there.
    double compute_ns = 0;
    double transfer_ns = 0;
    // Between two actions while all inputs were there; a simulated device starts at once.
    double issue_ns = 0;

    friend bool operator==(const Bubble&, const Bubble&) = default;
};

// The cause that decided when an action started: nothing (it starts with the step), the action
// before it on its device, an input the moment it was computed, or the transfer of an input.
enum class Wait : std::uint8_t { NOTHING, ROW, INPUT, TRANSFER };

struct Step {
    int device;
    Span span;
    Wait wait;

    friend bool operator==(const Step&, const Step&) = default;
};

// One for each device. Throws as `simulate` does.
std::vector<Bubble> bubbles(const Plan& plan, const Costs& costs);

// The same of a step that ran. A measurement does not say when an input arrived: its transfer lasts
// from its end to the start of the action that waited. Throws PlanError for a plan that cannot run,
// std::invalid_argument where the timeline's rows are not those of the plan.
std::vector<Bubble> bubbles(const Plan& plan, const Timeline& measured);

// The chain of actions from the start to the last end in which each starts as soon as the one
// before it lets it: what one of them takes longer, the step takes longer, but for what hides in a
// pair. Where the row and an input are equally late it follows the row. Throws as `simulate` does.
std::vector<Step> critical_path(const Plan& plan, const Costs& costs);

// The same of a step that ran: each action starts some time after the one before it let it.
std::vector<Step> critical_path(const Plan& plan, const Timeline& measured);

}  // namespace pykern
