#include "plan/clock.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan/check.hpp"
#include "plan/order.hpp"

namespace pykern {

namespace {

// Costs of actions that the plan does not run may be unknown.
void require_known(const Plan& plan, const Costs& costs) {
    for (const Row& row : plan.rows()) {
        for (const Action& action : row) costs.require_known(action.kind, action.stage);
    }
}

}  // namespace

Clock::Clock(const Plan& plan, const Costs& costs)
    : plan_(plan),
      links_(plan),
      transfer_ns_(costs.table().transfer_ns),
      overhead_ns_(costs.table().overhead_ns),
      hidden_(costs.table().overlap),
      shared_links_(costs.table().shared_links),
      link_free_ns_(links_.all().size(), 0),
      sent_ns_(plan.rows().size()),
      rows_(plan.rows().size()),
      free_ns_(plan.rows().size(), 0) {
    costs.require_fits(plan.num_stages(), plan.num_devices());
    const auto num_stages = static_cast<std::size_t>(plan.num_stages());
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
        for (std::size_t stage = 0; stage < num_stages; ++stage) {
            durations_ns_.push_back(costs.of(static_cast<Kind>(kind), stage));
        }
    }
    // A walk over all actions, for the few costs that do not know everything.
    if (std::ranges::any_of(durations_ns_, [](double time_ns) { return std::isnan(time_ns); })) {
        require_known(plan, costs);
    }
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        message_ns_.push_back(costs.message_ns(stage));
    }
    for (std::size_t device = 0; device < rows_.size(); ++device) {
        speeds_.push_back(value_of(costs.table().device_speeds, device));
        rows_[device].reserve(plan.rows()[device].size());
    }
}

double Clock::duration_ns(std::size_t device, Action action) const {
    const std::size_t entry = static_cast<std::size_t>(action.kind) * message_ns_.size();
    return overhead_ns_ + durations_ns_[entry + action.stage] / speeds_[device];
}

void Clock::finish(std::size_t device, std::size_t position, std::size_t together) {
    const Row& row = plan_.rows()[device];
    std::vector<Span>& spans = rows_[device];
    const double start_ns = std::max(free_ns_[device], ready_ns_);
    double busy_ns = duration_ns(device, row[position]);
    if (together == 2) {
        const double other_ns = duration_ns(device, row[position + 1]);
        busy_ns = std::max(busy_ns, other_ns) + (1 - hidden_) * std::min(busy_ns, other_ns);
    }
    const double end_ns = free_ns_[device] = start_ns + busy_ns;
    for (std::size_t i = 0; i < together; ++i) {
        const Action action = row[position + i];
        spans.push_back({action, start_ns, end_ns});
        if (shared_links_) send(device, action, end_ns);
    }
}

void Clock::leave_out(std::size_t device, std::size_t position) {
    const double now_ns = free_ns_[device];
    rows_[device].push_back({plan_.rows()[device][position], now_ns, now_ns});
    if (shared_links_) sent_ns_[device].push_back(now_ns);
}

void Clock::send(std::size_t device, Action action, double end_ns) {
    double& sent_ns = sent_ns_[device].emplace_back(end_ns);
    const int link = links_.of(action);
    if (link == Links::kStays) return;
    double& free_ns = link_free_ns_[static_cast<std::size_t>(link)];
    sent_ns = free_ns = std::max(end_ns, free_ns) + message_ns_[boundary_of(action)];
}

Simulated run_clock(const Plan& plan, const Costs& costs) {
    Simulated simulated{check_rows(plan), Clock(plan, costs)};
    require_finished(plan, simulated.index, walk(plan, simulated.index, simulated.clock));
    for (const std::vector<Span>& row : simulated.clock.rows()) {
        if (row.empty() || std::isfinite(row.back().end_ns)) continue;
        throw std::invalid_argument(
            "the costs must add up to a finite number of nanoseconds, got more than a double "
            "holds");
    }
    return simulated;
}

}  // namespace pykern
