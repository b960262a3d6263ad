// Order: one sequence of all actions that every device could have run one after the other.
#pragma once

#include <vector>

#include "plan/action.hpp"
#include "plan/index.hpp"
#include "plan/plan.hpp"

namespace pykern {

// Every action after its inputs and after its row's earlier actions. Where the plan deadlocks the
// sequence ends early: it holds each row up to its first action that can never run. The plan must
// be complete, every action once and on its stage's device. Linear in the number of actions.
std::vector<Action> run_order(const Plan& plan, const Index& index);

}  // namespace pykern
