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

    void run_row(int device) {
        const Row& row = plan_.rows()[static_cast<std::size_t>(device)];
        int& next = next_[static_cast<std::size_t>(device)];
        while (next < static_cast<int>(row.size())) {
            const Action action = row[static_cast<std::size_t>(next)];
            if (waits(action, device)) return;
            order_.push_back(action);
            wake(index_.row_start(device) + next);
            ++next;
        }
    }

    bool waits(Action action, int device) {
        for (const Action& input : inputs_of(action, plan_.num_stages())) {
            if (has_run(input)) continue;
            int& first = first_waiter_[static_cast<std::size_t>(index_.at(input))];
            next_waiter_[static_cast<std::size_t>(device)] = first;
            first = device;
            return true;
        }
        return false;
    }

    bool has_run(Action action) const {
        const int device = plan_.placement().device_of(action.stage);
        return index_.at(action) <
               index_.row_start(device) + next_[static_cast<std::size_t>(device)];
    }

    void wake(int position) {
        int device = first_waiter_[static_cast<std::size_t>(position)];
        for (; device != kNobody; device = next_waiter_[static_cast<std::size_t>(device)]) {
            ready_.push_back(device);
        }
    }

    const Plan& plan_;
    const Index& index_;
    std::vector<int> next_;
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
