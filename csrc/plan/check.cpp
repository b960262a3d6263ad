#include "plan/check.hpp"

#include <cstdint>
#include <vector>

#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/order.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

std::string message(Rule rule, const Plan& plan, int device, std::size_t position,
                    const std::string& what) {
    return std::string(rule.id) + " (" + rule.name + "): device " + std::to_string(device) +
           ", position " + std::to_string(position) + ": " + what + "\n" +
           table_at(plan, device, position);
}

// Calls visit(device, position in the row, action) for every action of the plan.
template <class Visit>
void for_each_action(const Plan& plan, Visit visit) {
    for (int device = 0; device < plan.num_devices(); ++device) {
        const Row& row = plan.rows()[static_cast<std::size_t>(device)];
        for (std::size_t position = 0; position < row.size(); ++position) {
            visit(device, position, row[position]);
        }
    }
}

void require_in_range(const Plan& plan) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        if (action.stage < plan.num_stages() &&
            static_cast<std::int64_t>(action.microbatch) < plan.num_microbatches()) {
            return;
        }
        throw PlanError(kInRange, plan, device, position,
                        to_text(action) + " is outside a plan of " +
                            std::to_string(plan.num_stages()) + " stages and " +
                            std::to_string(plan.num_microbatches()) + " microbatches");
    });
}

void require_can_run(const Plan& plan) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        if (action.kind == Kind::F || action.kind == Kind::B) return;
        throw PlanError(kCanRun, plan, device, position,
                        to_text(action) + " is of kind " + kind_name(action.kind) +
                            ", which cannot run yet; a plan may hold F and B");
    });
}

void require_once(const Plan& plan, const Index& index) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        const int first = index.at(action);
        if (first == index.row_start(device) + static_cast<int>(position)) return;
        int owner = device;
        while (index.row_start(owner) > first) --owner;
        throw PlanError(kOnce, plan, device, position,
                        to_text(action) + " stands already at device " + std::to_string(owner) +
                            ", position " + std::to_string(first - index.row_start(owner)));
    });
}

void require_placed(const Plan& plan) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        const int owner = plan.placement().device_of(action.stage);
        if (device == owner) return;
        throw PlanError(kPlaced, plan, device, position,
                        to_text(action) + " belongs on device " + std::to_string(owner));
    });
}

void require_all(const Plan& plan, const Index& index, Kind kind) {
    for (int stage = 0; stage < plan.num_stages(); ++stage) {
        for (int microbatch = 0; microbatch < plan.num_microbatches(); ++microbatch) {
            const Action action = make_action(kind, stage, microbatch);
            if (index.at(action) >= 0) continue;
            const int device = plan.placement().device_of(stage);
            throw PlanError(kComplete, plan, device,
                            plan.rows()[static_cast<std::size_t>(device)].size(),
                            to_text(action) + " is missing");
        }
    }
}

// A plan of forwards alone is complete too: inference runs it.
void require_complete(const Plan& plan, const Index& index) {
    require_all(plan, index, Kind::F);
    if (index.has(Kind::B)) require_all(plan, index, Kind::B);
}

// Deadlocks on one device, told apart because they are the commonest mistake and easy to say.
void require_ordered(const Plan& plan, const Index& index) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        for (const Action& input : inputs_of(action, plan.num_stages())) {
            if (plan.placement().device_of(input.stage) != device) continue;
            if (index.at(input) < index.at(action)) continue;
            throw PlanError(kOrdered, plan, device, position,
                            to_text(action) + " stands before " + to_text(input) +
                                ", which it needs, on the same device");
        }
    });
}

// How many actions of each row the sequence holds.
std::vector<std::size_t> reached_by(const Plan& plan, const std::vector<Action>& order) {
    std::vector<std::size_t> reached(plan.rows().size(), 0);
    for (const Action& action : order) {
        ++reached[static_cast<std::size_t>(plan.placement().device_of(action.stage))];
    }
    return reached;
}

void require_no_deadlock(const Plan& plan, const Index& index) {
    const std::vector<std::size_t> reached = reached_by(plan, run_order(plan, index));
    for (int device = 0; device < plan.num_devices(); ++device) {
        const std::size_t position = reached[static_cast<std::size_t>(device)];
        const Row& row = plan.rows()[static_cast<std::size_t>(device)];
        if (position == row.size()) continue;
        for (const Action& input : inputs_of(row[position], plan.num_stages())) {
            const auto owner = static_cast<std::size_t>(plan.placement().device_of(input.stage));
            const int stop =
                index.row_start(static_cast<int>(owner)) + static_cast<int>(reached[owner]);
            if (index.at(input) < stop) continue;
            throw PlanError(kNoDeadlock, plan, device, position,
                            to_text(row[position]) + " waits for " + to_text(input) +
                                ", which never runs: device " + std::to_string(owner) +
                                " is stopped at " + to_text(plan.rows()[owner][reached[owner]]));
        }
    }
}

}  // namespace

PlanError::PlanError(Rule rule, const Plan& plan, int device, std::size_t position,
                     const std::string& what)
    : std::runtime_error(message(rule, plan, device, position, what)),
      rule_(rule.id),
      device_(device),
      position_(position) {}

void check(const Plan& plan) {
    require_in_range(plan);
    require_can_run(plan);
    const Index index(plan);
    require_once(plan, index);
    require_placed(plan);
    require_complete(plan, index);
    require_ordered(plan, index);
    require_no_deadlock(plan, index);
}

}  // namespace pykern
