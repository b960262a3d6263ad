#include "plan/check.hpp"

#include <algorithm>
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
        const bool per_stage = action.kind == Kind::REDUCE;
        const std::int64_t num_microbatches = per_stage ? 1 : plan.num_microbatches();
        const int num_slices = per_stage ? 1 : plan.num_slices();
        if (action.stage < plan.num_stages() && action.microbatch < num_microbatches &&
            action.slice < num_slices) {
            return;
        }
        throw PlanError(kInRange, plan, device, position,
                        to_text(action) + " is outside a plan of " +
                            std::to_string(plan.num_stages()) + " stages, " +
                            std::to_string(num_microbatches) + " microbatches and " +
                            std::to_string(num_slices) + " slices");
    });
}

void require_authored(const Plan& plan) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        if (action.kind != Kind::COPY_F && action.kind != Kind::COPY_B) return;
        throw PlanError(kAuthored, plan, device, position,
                        to_text(action) +
                            " is a transfer, which is derived from the plan; a row "
                            "holds what a device computes");
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
        const int owner = plan.device_of(action);
        if (device == owner) return;
        throw PlanError(kPlaced, plan, device, position,
                        to_text(action) + " belongs on device " + std::to_string(owner));
    });
}

[[noreturn]] void refuse_missing(const Plan& plan, Action action, const std::string& why) {
    const int device = plan.device_of(action);
    throw PlanError(kComplete, plan, device, plan.rows()[static_cast<std::size_t>(device)].size(),
                    to_text(action) + " is missing" + why);
}

// One B, or one I and one W.
void require_backward(const Plan& plan, const Index& index, Action cell) {
    const bool whole = index.at(with_kind(cell, Kind::B)) >= 0;
    const Action input = with_kind(cell, Kind::I);
    const Action weight = with_kind(cell, Kind::W);
    const bool has_input = index.at(input) >= 0;
    const bool has_weight = index.at(weight) >= 0;
    if (whole && (has_input || has_weight)) {
        const Action extra = has_input ? input : weight;
        const int device = plan.device_of(extra);
        throw PlanError(kOneBackward, plan, device,
                        static_cast<std::size_t>(index.at(extra) - index.row_start(device)),
                        to_text(extra) + " is part of " + to_text(with_kind(cell, Kind::B)) +
                            ", which stands in the plan as well");
    }
    if (whole || (has_input && has_weight)) return;
    if (has_input) refuse_missing(plan, weight, ", the other half of " + to_text(input));
    if (has_weight) refuse_missing(plan, input, ", the other half of " + to_text(weight));
    refuse_missing(plan, with_kind(cell, Kind::B), "");
}

// Calls visit(cell) with the F of every stage, microbatch and slice.
template <class Visit>
void for_each_cell(const Plan& plan, Visit visit) {
    for (int stage = 0; stage < plan.num_stages(); ++stage) {
        for (int microbatch = 0; microbatch < plan.num_microbatches(); ++microbatch) {
            for (int slice = 0; slice < plan.num_slices(); ++slice) {
                visit(Action{static_cast<std::uint32_t>(microbatch),
                             static_cast<std::uint16_t>(stage), Kind::F,
                             static_cast<std::uint8_t>(slice)});
            }
        }
    }
}

// A cell that goes out must come back, and comes back only after it has gone out.
void require_both(const Plan& plan, const Index& index, Action cell) {
    const Action out = with_kind(cell, Kind::OFFLOAD);
    const Action back = with_kind(cell, Kind::LOAD);
    if ((index.at(out) >= 0) == (index.at(back) >= 0)) return;
    if (index.at(out) < 0) refuse_missing(plan, out, ", but " + to_text(back) + " is there");
    refuse_missing(plan, back, ", but " + to_text(out) + " is there");
}

// The words for an action that stands in a plan only for a backward; null for another one.
const char* serves_backward(Kind kind) {
    switch (kind) {
        case Kind::R:
            return " recomputes for";
        case Kind::REDUCE:
            return " sums gradients of";
        case Kind::U:
            return " applies gradients of";
        default:
            return nullptr;
    }
}

// The first stages, which may be all, have forwards alone.
void require_forwards_alone(const Plan& plan, int num_stages) {
    const std::string whose = num_stages < plan.num_stages() ? "the stage" : "the plan";
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        const char* serves = serves_backward(action.kind);
        if (action.stage >= num_stages || serves == nullptr) return;
        throw PlanError(kComplete, plan, device, position,
                        to_text(action) + serves + " a backward, and " + whose + " has none");
    });
}

// Stages in front of the first that trains have forwards alone, which is complete; so is a plan of
// nothing else: inference runs it.
void require_complete(const Plan& plan, const Index& index) {
    const int first_trained = plan.first_trained();
    if (first_trained > 0) require_forwards_alone(plan, first_trained);
    const bool offloads = index.has(Kind::OFFLOAD) || index.has(Kind::LOAD);
    for_each_cell(plan, [&](Action cell) {
        if (index.at(cell) < 0) refuse_missing(plan, cell, "");
        if (cell.stage >= first_trained) require_backward(plan, index, cell);
        if (offloads) require_both(plan, index, cell);
    });
    if (!index.has(Kind::REDUCE)) return;
    for (int stage = first_trained; stage < plan.num_stages(); ++stage) {
        const Action reduce = make_action(Kind::REDUCE, stage, 0);
        if (index.at(reduce) < 0) refuse_missing(plan, reduce, "");
    }
}

// A walk that only asks whether every action can run.
struct Untimed {
    void begin() {}
    void input(Action /*action*/, Action /*input*/, std::size_t /*row*/, std::size_t /*position*/) {
    }
    void finish(std::size_t /*row*/, std::size_t /*position*/, std::size_t /*together*/) {}
};

// A forward beside a backward that needs nothing of it: anything else has no gain or no meaning.
void require_pairs(const Plan& plan) {
    const auto is_backward = [](Action action) {
        return action.kind == Kind::B || action.kind == Kind::I;
    };
    for (int device = 0; device < plan.num_devices(); ++device) {
        const Row& row = plan.rows()[static_cast<std::size_t>(device)];
        for (const std::size_t start : plan.overlaps()[static_cast<std::size_t>(device)]) {
            const Action first = row[start];
            const Action second = row[start + 1];
            if (first.kind == Kind::F && is_backward(second) &&
                first.microbatch != second.microbatch) {
                continue;
            }
            throw PlanError(kOverlap, plan, device, start,
                            to_text(first) + " cannot overlap with " + to_text(second) +
                                "; a pair is an F and then a B or I of another microbatch");
        }
    }
}

// Deadlocks on one device, told apart because they are the commonest mistake and easy to say.
void require_ordered(const Plan& plan, const Index& index) {
    for_each_action(plan, [&](int device, std::size_t position, Action action) {
        const int here = index.row_start(device) + static_cast<int>(position);
        for_each_input(action, index, [&](Action input, int stands) {
            if (stands <= here || stands >= index.row_start(device + 1)) return;
            throw PlanError(kOrdered, plan, device, position,
                            to_text(action) + " stands before " + to_text(input) +
                                ", which it needs, on the same device");
        });
    });
}

}  // namespace

void require_finished(const Plan& plan, const Index& index,
                      const std::vector<std::size_t>& reached) {
    const auto ended = [&](std::size_t ran, const Row& row) { return ran == row.size(); };
    if (std::ranges::equal(reached, plan.rows(), ended)) {
        plan.passed().set();
        return;
    }
    require_ordered(plan, index);
    const auto refuse = [&](int device, std::size_t position, Action input, int stands) {
        const auto owner = static_cast<std::size_t>(plan.device_of(input));
        const int stop =
            index.row_start(static_cast<int>(owner)) + static_cast<int>(reached[owner]);
        if (stands < stop) return;
        const Row& row = plan.rows()[static_cast<std::size_t>(device)];
        throw PlanError(kNoDeadlock, plan, device, position,
                        to_text(row[position]) + " waits for " + to_text(input) +
                            ", which never runs: device " + std::to_string(owner) +
                            " is stopped at " + to_text(plan.rows()[owner][reached[owner]]));
    };
    for (int device = 0; device < plan.num_devices(); ++device) {
        const auto row_number = static_cast<std::size_t>(device);
        const Row& row = plan.rows()[row_number];
        const std::size_t position = reached[row_number];
        if (position == row.size()) continue;
        // The second of a pair may be what holds its first back.
        const bool pair = std::ranges::binary_search(plan.overlaps()[row_number], position);
        for (std::size_t i = position; i < position + (pair ? 2 : 1); ++i) {
            for_each_input(row[i], index,
                           [&](Action input, int stands) { refuse(device, i, input, stands); });
        }
    }
}

PlanError::PlanError(Rule rule, const Plan& plan, int device, std::size_t position,
                     const std::string& what)
    : std::runtime_error(message(rule, plan, device, position, what)),
      rule_(rule.id),
      device_(device),
      position_(position) {}

Index check_rows(const Plan& plan) {
    if (plan.passed()) return Index(plan);
    require_in_range(plan);
    require_authored(plan);
    Index index(plan);
    require_once(plan, index);
    require_placed(plan);
    require_complete(plan, index);
    require_pairs(plan);
    return index;
}

void check(const Plan& plan) {
    if (plan.passed()) return;
    const Index index = check_rows(plan);
    Untimed run;
    require_finished(plan, index, walk(plan, index, run));
}

Plan checked(Plan plan) {
    check(plan);
    return plan;
}

void check_memory(const Plan& plan, const Memory& memory, double cap_bytes) {
    for_each_held(plan, memory, [&](int device, std::size_t position, double held_bytes) {
        if (held_bytes <= cap_bytes) return;
        const Action action = plan.rows()[static_cast<std::size_t>(device)][position];
        throw PlanError(kFits, plan, device, position,
                        to_text(action) + " makes the device hold " + std::to_string(held_bytes) +
                            " bytes, and the cap is " + std::to_string(cap_bytes));
    });
}

}  // namespace pykern
