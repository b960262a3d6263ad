#include "plan/explain.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "plan/check.hpp"
#include "plan/clock.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"

namespace pykern {

namespace {

struct Place {
    std::size_t device;
    std::size_t position;
};

struct Arrival {
    Place sender;
    double end_ns;
    double arrival_ns;

    bool is_ahead_of(const Arrival& other) const {
        return std::tie(arrival_ns, end_ns) < std::tie(other.arrival_ns, other.end_ns);
    }
};

using Rows = std::vector<std::vector<Span>>;

// Without a circle, or the walk along a made-up timeline might not end.
Index index_of_checked(const Plan& plan) {
    check(plan);
    return Index(plan);
}

// A step that is explained, simulated or measured.
class Explainer {
   public:
    // Throws as `simulate` does.
    Explainer(const Plan& plan, const Costs& costs) : Explainer(plan, run_clock(plan, costs)) {}

    // Throws where the rows are not those of the plan.
    Explainer(const Plan& plan, const Timeline& measured)
        : plan_(plan), index_(index_of_checked(plan)), rows_(measured.rows()) {
        begin_ns_ = measured.first_start_ns();
        require_rows();
    }

    // Rows may lie in the clock.
    Explainer(const Explainer&) = delete;
    Explainer& operator=(const Explainer&) = delete;

    double begin_ns() const { return begin_ns_; }
    std::size_t num_devices() const { return rows_.size(); }
    const std::vector<Span>& row(std::size_t device) const { return rows_[device]; }
    const Span& span(Place place) const { return row(place.device)[place.position]; }

    // Where the slot starts that holds the place: one before it for the second of a pair.
    Place slot_of(Place place) const {
        const bool second = place.position > 0 && is_pair({place.device, place.position - 1});
        return {place.device, place.position - (second ? 1 : 0)};
    }

    // The input of a slot that comes last from another device; among several the one that was
    // computed last. There is one where a simulated slot starts after its device is free.
    Arrival last_arrival(Place slot) const {
        Arrival last{slot, -1, -1};
        for (std::size_t i = 0; i < (is_pair(slot) ? 2U : 1U); ++i) {
            const Action action = row(slot.device)[slot.position + i].action;
            for_each_input(action, index_, [&](Action input, int stands) {
                const int device = plan_.device_of(input);
                const Place sender{static_cast<std::size_t>(device),
                                   static_cast<std::size_t>(stands - index_.row_start(device))};
                if (sender.device == slot.device) return;
                const double arrival_ns = arrival_of(action, input, sender);
                const double end_ns = span(sender).end_ns;
                const Arrival arrival{sender, end_ns, arrival_ns};
                if (last.is_ahead_of(arrival)) last = arrival;
            });
        }
        return last;
    }

   private:
    Explainer(const Plan& plan, Simulated simulated)
        : plan_(plan),
          index_(std::move(simulated.index)),
          clock_(std::move(simulated.clock)),
          rows_(clock_->rows()) {}

    // Threads run one action after the other, whatever a plan pairs.
    bool is_pair(Place slot) const {
        return clock_ && std::ranges::binary_search(plan_.overlaps()[slot.device], slot.position);
    }

    double arrival_of(Action action, Action input, Place sender) const {
        if (!clock_) return span(sender).end_ns;
        return clock_->arrival_ns(action, input, sender.device, sender.position);
    }

    void require_rows() const {
        const auto is_of = [](const Span& span, Action action) { return span.action == action; };
        const auto are_of = [&](const std::vector<Span>& spans, const Row& row) {
            return std::ranges::equal(spans, row, is_of);
        };
        if (std::ranges::equal(rows_, plan_.rows(), are_of)) return;
        throw std::invalid_argument(
            "measured must have the actions of the plan, got others. Give the plan that ran, and "
            "a step that ended");
    }

    const Plan& plan_;
    Index index_;
    std::optional<Clock> clock_;  // of a simulated step
    const Rows& rows_;
    double begin_ns_ = 0;
};

Bubble bubble_of(const Explainer& explainer, std::size_t device, double end_ns) {
    const std::vector<Span>& row = explainer.row(device);
    if (row.empty()) return {.before_first_ns = end_ns - explainer.begin_ns()};
    Bubble bubble{.before_first_ns = row.front().start_ns - explainer.begin_ns(),
                  .after_last_ns = end_ns - row.back().end_ns};
    for (std::size_t position = 1; position < row.size(); ++position) {
        const double idle_from_ns = row[position - 1].end_ns;
        const double idle_ns = row[position].start_ns - idle_from_ns;
        if (idle_ns <= 0) continue;
        const Arrival last = explainer.last_arrival({device, position});
        // Nothing but an input from elsewhere keeps a simulated device idle.
        if (last.arrival_ns <= idle_from_ns) {
            bubble.issue_ns += idle_ns;
            continue;
        }
        const double compute_ns = std::clamp(last.end_ns - idle_from_ns, 0.0, idle_ns);
        bubble.compute_ns += compute_ns;
        bubble.transfer_ns += idle_ns - compute_ns;
    }
    return bubble;
}

Place last_to_end(const Explainer& explainer) {
    Place last{0, 0};
    double end_ns = -1;
    for (std::size_t device = 0; device < explainer.num_devices(); ++device) {
        const std::vector<Span>& row = explainer.row(device);
        if (row.empty() || row.back().end_ns <= end_ns) continue;
        last = {device, row.size() - 1};
        end_ns = row.back().end_ns;
    }
    return last;
}

std::vector<Bubble> bubbles_of(const Explainer& explainer) {
    const double end_ns = explainer.span(last_to_end(explainer)).end_ns;
    std::vector<Bubble> result;
    result.reserve(explainer.num_devices());
    for (std::size_t device = 0; device < explainer.num_devices(); ++device) {
        result.push_back(bubble_of(explainer, device, end_ns));
    }
    return result;
}

std::vector<Step> path_of(const Explainer& explainer) {
    std::vector<Step> path;
    Place place = last_to_end(explainer);
    while (true) {
        const Span& span = explainer.span(place);
        path.push_back({static_cast<int>(place.device), span, Wait::NOTHING});
        Step& step = path.back();
        if (span.start_ns == explainer.begin_ns()) break;
        const Place slot = explainer.slot_of(place);
        const Arrival last = explainer.last_arrival(slot);
        const Place before{slot.device, slot.position - 1};
        if (slot.position > 0 && explainer.span(before).end_ns >= last.arrival_ns) {
            step.wait = Wait::ROW;
            place = before;
        } else if (last.end_ns < 0) {
            break;  // a device that began later than others, though nothing kept it
        } else {
            place = last.sender;
            step.wait = last.end_ns == span.start_ns ? Wait::INPUT : Wait::TRANSFER;
        }
    }
    std::ranges::reverse(path);
    return path;
}

}  // namespace

std::vector<Bubble> bubbles(const Plan& plan, const Costs& costs) {
    return bubbles_of(Explainer(plan, costs));
}

std::vector<Bubble> bubbles(const Plan& plan, const Timeline& measured) {
    return bubbles_of(Explainer(plan, measured));
}

std::vector<Step> critical_path(const Plan& plan, const Costs& costs) {
    return path_of(Explainer(plan, costs));
}

std::vector<Step> critical_path(const Plan& plan, const Timeline& measured) {
    return path_of(Explainer(plan, measured));
}

}  // namespace pykern
