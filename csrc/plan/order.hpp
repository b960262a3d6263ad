// Order: a sequence of all actions that every device could have run one after the other.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "plan/action.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/plan.hpp"

namespace pykern {

// Runs each row until it meets an action with inputs that have not run, and parks the device until
// the last of them has: so no action is looked at more than twice, however many inputs it has. A
// row runs from its front, so all that is remembered is a position and the waiters per device.
//
// It tells `run` what happens: begin() before it looks at a device's next slot; input(action,
// input, its row, its position there) for every input on another device; and finish(row, position,
// number of actions in the slot) once the slot can run.
template <class Run>
class Walk {
   public:
    Walk(const Plan& plan, const Index& index, Run& run)
        : plan_(plan),
          index_(index),
          run_(run),
          next_(plan.rows().size(), 0),
          next_overlap_(plan.rows().size(), 0),
          num_missing_(plan.rows().size(), 0),
          waiters_(plan.rows().size()) {}

    std::vector<std::size_t> to_the_end() && {
        for (int device = 0; device < plan_.num_devices(); ++device) {
            ready_.push_back(device);
            while (!ready_.empty()) {
                const int awake = ready_.back();
                ready_.pop_back();
                run_row(awake);
            }
        }
        return std::move(next_);
    }

   private:
    // A device that waits for an action of another, and that action's position in its row.
    struct Waiter {
        std::size_t position;
        int device;

        friend auto operator<=>(const Waiter&, const Waiter&) = default;
    };

    void run_row(int device) {
        const auto row_number = static_cast<std::size_t>(device);
        const Row& row = plan_.rows()[row_number];
        std::size_t& next = next_[row_number];
        while (next < row.size()) {
            // Two actions that share a slot start together, so both must be able to.
            const std::size_t together = starts_pair(row_number, next) ? 2 : 1;
            run_.begin();
            for (std::size_t i = 0; i < together; ++i) {
                if (waits(row[next + i], device)) return;
            }
            run_.finish(row_number, next, together);
            next += together;
            wake(waiters_[row_number], next);
        }
    }

    bool starts_pair(std::size_t row, std::size_t position) {
        const Overlaps& starts = plan_.overlaps()[row];
        std::size_t& pair = next_overlap_[row];
        while (pair < starts.size() && starts[pair] < position) ++pair;
        return pair < starts.size() && starts[pair] == position;
    }

    bool waits(Action action, int device) {
        int& num_missing = num_missing_[static_cast<std::size_t>(device)];
        for_each_input(action, index_, [&](Action input, int position) {
            const int owner = plan_.device_of(input);
            const auto row = static_cast<std::size_t>(owner);
            const auto place = static_cast<std::size_t>(position - index_.row_start(owner));
            if (place < next_[row]) {
                if (owner != device) run_.input(action, input, row, place);
            } else {
                ++num_missing;
                waiters_[row].push_back({place, device});
                std::ranges::push_heap(waiters_[row], std::greater{});
            }
        });
        return num_missing > 0;
    }

    void wake(std::vector<Waiter>& waiters, std::size_t next) {
        while (!waiters.empty() && waiters.front().position < next) {
            const int device = waiters.front().device;
            if (--num_missing_[static_cast<std::size_t>(device)] == 0) ready_.push_back(device);
            std::ranges::pop_heap(waiters, std::greater{});
            waiters.pop_back();
        }
    }

    const Plan& plan_;
    const Index& index_;
    Run& run_;
    std::vector<std::size_t> next_;
    std::vector<std::size_t> next_overlap_;
    // By device: inputs of the action it is parked at that have not run.
    std::vector<int> num_missing_;
    // By device that is waited for: a heap, the earliest position in front.
    std::vector<std::vector<Waiter>> waiters_;
    std::vector<int> ready_;
};

// Runs every action after its inputs and after its row's earlier actions, and returns how many of
// each row ran: where the plan deadlocks a row stops at its first action that can never run. The
// plan must be complete, every action once and on its stage's device. Linear in the number of
// actions but for the heaps of waiters.
template <class Run>
std::vector<std::size_t> walk(const Plan& plan, const Index& index, Run& run) {
    return Walk<Run>(plan, index, run).to_the_end();
}

}  // namespace pykern
