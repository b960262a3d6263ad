#include "plan/order.hpp"

#include <cstddef>
#include <utility>

#include "plan/inputs.hpp"

namespace pykern {

namespace {

// Runs each row until it meets an action whose input has not run, and parks the device there.
// A device waits for one action at a time, so the waiters of an action are a list through devices.
class Walk {
   public:
    Walk(const Plan& plan, const Index& index)
        : plan_(plan),
          index_(index),
          next_(plan.rows().size(), 0),
          next_overlap_(plan.rows().size(), 0),
          next_waiter_(plan.rows().size(), kNobody),
          first_waiter_(plan.num_actions(), kNobody) {}

    std::vector<Action> run() && {
        order_.reserve(first_waiter_.size());
        for (int device = 0; device < plan_.num_devices(); ++device) {
            ready_.push_back(device);
            while (!ready_.empty()) {
                const int awake = ready_.back();
                ready_.pop_back();
                run_row(awake);
            }
        }
        return std::move(order_);
    }

   private:
    static constexpr int kNobody = -1;
    static constexpr int kHasRun = -2;

    void run_row(int device) {
        const auto row_number = static_cast<std::size_t>(device);
        const Row& row = plan_.rows()[row_number];
        std::size_t& next = next_[row_number];
        while (next < row.size()) {
            // Two actions that share a slot start together, so both must be able to.
            const std::size_t together = starts_pair(row_number, next) ? 2 : 1;
            for (std::size_t i = 0; i < together; ++i) {
                if (waits(row[next + i], device)) return;
            }
            for (std::size_t i = 0; i < together; ++i) {
                order_.push_back(row[next]);
                finish(index_.row_start(device) + static_cast<int>(next));
                ++next;
            }
        }
    }

    bool starts_pair(std::size_t row, std::size_t position) {
        const Overlaps& starts = plan_.overlaps()[row];
        std::size_t& pair = next_overlap_[row];
        while (pair < starts.size() && starts[pair] < position) ++pair;
        return pair < starts.size() && starts[pair] == position;
    }

    bool waits(Action action, int device) {
        int missing = kNobody;
        for_each_input(action, index_, [&](Action, int position) {
            const bool has_run = first_waiter_[static_cast<std::size_t>(position)] == kHasRun;
            if (missing == kNobody && !has_run) missing = position;
        });
        if (missing == kNobody) return false;
        int& first = first_waiter_[static_cast<std::size_t>(missing)];
        next_waiter_[static_cast<std::size_t>(device)] = first;
        first = device;
        return true;
    }

    void finish(int position) {
        int& first = first_waiter_[static_cast<std::size_t>(position)];
        for (int device = first; device != kNobody;
             device = next_waiter_[static_cast<std::size_t>(device)]) {
            ready_.push_back(device);
        }
        first = kHasRun;
    }

    const Plan& plan_;
    const Index& index_;
    std::vector<std::size_t> next_;
    std::vector<std::size_t> next_overlap_;
    std::vector<int> next_waiter_;
    std::vector<int> first_waiter_;
    std::vector<int> ready_;
    std::vector<Action> order_;
};

}  // namespace

std::vector<Action> run_order(const Plan& plan, const Index& index) {
    return Walk(plan, index).run();
}

}  // namespace pykern
