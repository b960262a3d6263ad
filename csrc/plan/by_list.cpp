#include "plan/by_list.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan/check.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/require.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

// In the order in which a device tries them.
enum Queue : std::uint8_t { kForwards, kBackwards, kWeights, kNumQueues };

Queue queue_of(Action action) {
    switch (action.kind) {
        case Kind::F:
            return kForwards;
        case Kind::B:
        case Kind::I:
            return kBackwards;
        case Kind::W:
            return kWeights;
        default:
            throw std::invalid_argument("actions must be F, B, I or W for list scheduling, got " +
                                        to_text(action));
    }
}

struct Device {
    std::array<Row, kNumQueues> queues;
    std::array<std::size_t, kNumQueues> next{};
    int in_flight = 0;
    Row row;

    const Action* head(std::size_t queue) const {
        const Row& actions = queues[queue];
        return next[queue] < actions.size() ? &actions[next[queue]] : nullptr;
    }

    // `goes_back`: whether the action's stage has a backward, for which its F keeps something.
    void start(Action action, bool goes_back) {
        ++next[queue_of(action)];
        if (action.kind == Kind::F && goes_back) ++in_flight;
        if (action.kind == Kind::B || action.kind == Kind::W) --in_flight;
        row.push_back(action);
    }
};

class ListScheduler {
   public:
    ListScheduler(const Plan& plan, int cap)
        : plan_(plan),
          index_(plan),
          cap_(cap),
          first_trained_(plan.first_trained()),
          has_ended_(plan.num_actions(), false) {
        for (const Row& row : plan.rows()) {
            Device& device = devices_.emplace_back();
            for (const Action& action : row) device.queues[queue_of(action)].push_back(action);
        }
    }

    std::vector<Row> run() && {
        std::vector<int> started;  // positions, in one slot; they end when the slot does
        for (std::size_t left = plan_.num_actions(); left > 0; left -= started.size()) {
            started.clear();
            for (Device& device : devices_) {
                const Action* action = choose(device);
                if (action == nullptr) continue;
                started.push_back(index_.at(*action));
                device.start(*action, action->stage >= first_trained_);
            }
            if (started.empty()) refuse();
            for (const int position : started) {
                has_ended_[static_cast<std::size_t>(position)] = true;
            }
        }
        std::vector<Row> rows;
        rows.reserve(devices_.size());
        for (Device& device : devices_) rows.push_back(std::move(device.row));
        return rows;
    }

   private:
    const Action* choose(const Device& device) const {
        for (std::size_t queue = kForwards; queue < kNumQueues; ++queue) {
            const Action* action = device.head(queue);
            if (action == nullptr || !can_start(*action)) continue;
            const bool takes = queue == kForwards && action->stage >= first_trained_;
            if (!takes || device.in_flight < cap_) return action;
        }
        return nullptr;
    }

    bool can_start(Action action) const {
        bool all = true;
        for_each_input(action, index_, [&](Action, int position) {
            all = all && has_ended_[static_cast<std::size_t>(position)];
        });
        return all;
    }

    // The first action of the plan's own order that has not run could start, but for the cap.
    [[noreturn]] void refuse() const {
        std::string held_back;
        for (std::size_t number = 0; number < devices_.size(); ++number) {
            const Action* action = devices_[number].head(kForwards);
            if (action == nullptr || !can_start(*action)) continue;
            held_back += ", device " + std::to_string(number) + " before " + to_text(*action);
        }
        throw std::invalid_argument("cap must be large enough for the plan to go on, got " +
                                    std::to_string(cap_) + ", which stops all devices" + held_back);
    }

    const Plan& plan_;
    const Index index_;
    const int cap_;
    const int first_trained_;
    std::vector<Device> devices_;
    std::vector<bool> has_ended_;
};

}  // namespace

Plan by_list(const Plan& plan, int cap) {
    check(plan);
    require_range("cap", cap, 1, kMaxCells);
    return checked({plan.placement(), plan.num_microbatches(), ListScheduler(plan, cap).run(),
                    plan.num_slices()});
}

}  // namespace pykern
