#include "plan/updates.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>

#include "plan/check.hpp"
#include "plan/require.hpp"

namespace pykern {

namespace {

// Backwards that a whole microbatch of a stage has left, counted down in a walk along a row:
// the W of a later slice may end after that of an earlier one.
class Backwards {
   public:
    explicit Backwards(int num_slices) : num_slices_(num_slices) {}

    // Whether this action ends the last of them.
    bool ended_by(Action action) {
        if (action.kind != Kind::B && action.kind != Kind::W) return false;
        return ++num_ended_[{action.stage, action.microbatch}] == num_slices_;
    }

   private:
    int num_slices_;
    std::map<std::pair<std::uint16_t, std::uint32_t>, int> num_ended_;
};

Row updated(const Plan& plan, int first_trained, std::size_t device, int group, int delay,
            const std::vector<int>& stages) {
    const int last = plan.num_microbatches() - 1;
    std::map<int, int> num_updates;
    Backwards backwards(plan.num_slices());
    Row row;
    const auto update = [&](int stage) {
        const int number = num_updates[stage]++;
        row.push_back(make_action(Kind::U, stage, std::min((number + 1) * group - 1, last)));
    };
    for (const Action& action : plan.rows()[device]) {
        const auto microbatch = static_cast<int>(action.microbatch);
        const bool starts_group =
            action.kind == Kind::F && action.slice == 0 && microbatch % group == 0;
        const bool updates = delay > 0 && action.stage >= first_trained;
        if (updates && starts_group && microbatch / group >= delay) update(action.stage);
        row.push_back(action);
        const bool ends_group = (microbatch + 1) % group == 0 || microbatch == last;
        if (delay == 0 && ends_group && backwards.ended_by(action)) update(action.stage);
    }
    for (const int stage : stages) {
        while (stage >= first_trained && num_updates[stage] * group <= last) update(stage);
    }
    return row;
}

// The versions that one stage holds on one device, and how many microbatches in flight read each.
struct Versions {
    int newest = 0;
    std::map<int, int> num_readers;

    int num_held() const {
        return static_cast<int>(num_readers.size()) + (num_readers.contains(newest) ? 0 : 1);
    }
};

}  // namespace

Plan with_updates(const Plan& plan, int group, int delay) {
    check(plan);
    require_range("group", group, 1, kMaxCells);
    require_range("delay", delay, 0, kMaxCells);
    if (plan.placement().num_replicas() > 1 || plan.has(Kind::U)) {
        throw std::invalid_argument(
            "plan must have one replica and no updates to add them, got another");
    }
    const int first_trained = plan.first_trained();
    const std::vector<std::vector<int>> stages = plan.placement().stages_by_device();
    std::vector<Row> rows;
    rows.reserve(stages.size());
    for (std::size_t device = 0; device < stages.size(); ++device) {
        rows.push_back(updated(plan, first_trained, device, group, delay, stages[device]));
    }
    return checked({plan.placement(), plan.num_microbatches(), std::move(rows), plan.num_slices()});
}

std::vector<int> weight_versions(const Plan& plan) {
    std::vector<int> most(static_cast<std::size_t>(plan.num_stages()), 1);
    for (const Row& row : plan.rows()) {
        std::map<int, Versions> stages;
        std::map<Action, int> read_by;  // the version that each forward in flight has read
        for (Action action : row) {
            const int stage = action.stage;
            Versions& versions = stages[stage];
            if (action.kind == Kind::U) ++versions.newest;
            if (action.kind == Kind::F) {
                ++versions.num_readers[versions.newest];
                read_by[action] = versions.newest;
            }
            if (action.kind == Kind::B || action.kind == Kind::W) {
                action.kind = Kind::F;
                const auto reader = read_by.extract(action);
                const auto readers = versions.num_readers.find(reader.mapped());
                if (--readers->second == 0) versions.num_readers.erase(readers);
            }
            int& here = most[static_cast<std::size_t>(stage)];
            here = std::max(here, versions.num_held());
        }
    }
    return most;
}

}  // namespace pykern
