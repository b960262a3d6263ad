#include "plan/explain.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>

#include "plan/clock.hpp"
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

class Explainer {
   public:
    Explainer(const Plan& plan, const Costs& costs)
        : plan_(plan), simulated_(run_clock(plan, costs)) {}

    const std::vector<Span>& row(std::size_t device) const {
        return simulated_.clock.rows()[device];
    }
    const Span& span(Place place) const { return row(place.device)[place.position]; }

    // Where the slot starts that holds the place: one before it for the second of a pair.
    Place slot_of(Place place) const {
        const bool second =
            place.position > 0 &&
            std::ranges::binary_search(plan_.overlaps()[place.device], place.position - 1);
        return {place.device, place.position - (second ? 1 : 0)};
    }

    // The input of a slot that comes last from another device; among several the one that was
    // computed last. There is one where the slot starts after its device is free.
    Arrival last_arrival(Place slot) const {
        Arrival last{slot, -1, -1};
        const bool pair = std::ranges::binary_search(plan_.overlaps()[slot.device], slot.position);
        for (std::size_t i = 0; i < (pair ? 2U : 1U); ++i) {
            const Action action = row(slot.device)[slot.position + i].action;
            for_each_input(action, simulated_.index, [&](Action input, int stands) {
                const int device = plan_.device_of(input);
                const Place sender{
                    static_cast<std::size_t>(device),
                    static_cast<std::size_t>(stands - simulated_.index.row_start(device))};
                if (sender.device == slot.device) return;
                const double arrival_ns =
                    simulated_.clock.arrival_ns(action, input, sender.device, sender.position);
                const double end_ns = span(sender).end_ns;
                const Arrival arrival{sender, end_ns, arrival_ns};
                if (last.is_ahead_of(arrival)) last = arrival;
            });
        }
        return last;
    }

   private:
    const Plan& plan_;
    Simulated simulated_;
};

Bubble bubble_of(const Explainer& explainer, std::size_t device, double makespan_ns) {
    const std::vector<Span>& row = explainer.row(device);
    if (row.empty()) return {.before_first_ns = makespan_ns};
    Bubble bubble{.before_first_ns = row.front().start_ns,
                  .after_last_ns = makespan_ns - row.back().end_ns};
    for (std::size_t position = 1; position < row.size(); ++position) {
        const double idle_from_ns = row[position - 1].end_ns;
        const double idle_ns = row[position].start_ns - idle_from_ns;
        if (idle_ns <= 0) continue;
        // Nothing but an input from elsewhere keeps a free device idle.
        const Arrival last = explainer.last_arrival({device, position});
        const double compute_ns = std::clamp(last.end_ns - idle_from_ns, 0.0, idle_ns);
        bubble.compute_ns += compute_ns;
        bubble.transfer_ns += idle_ns - compute_ns;
    }
    return bubble;
}

Place last_to_end(const Explainer& explainer, std::size_t num_devices) {
    Place last{0, 0};
    double end_ns = -1;
    for (std::size_t device = 0; device < num_devices; ++device) {
        const std::vector<Span>& row = explainer.row(device);
        if (row.empty() || row.back().end_ns <= end_ns) continue;
        last = {device, row.size() - 1};
        end_ns = row.back().end_ns;
    }
    return last;
}

}  // namespace

std::vector<Bubble> bubbles(const Plan& plan, const Costs& costs) {
    const Explainer explainer(plan, costs);
    const Place last = last_to_end(explainer, plan.rows().size());
    const double makespan_ns = explainer.span(last).end_ns;
    std::vector<Bubble> result;
    result.reserve(plan.rows().size());
    for (std::size_t device = 0; device < plan.rows().size(); ++device) {
        result.push_back(bubble_of(explainer, device, makespan_ns));
    }
    return result;
}

std::vector<Step> critical_path(const Plan& plan, const Costs& costs) {
    const Explainer explainer(plan, costs);
    std::vector<Step> path;
    Place place = last_to_end(explainer, plan.rows().size());
    while (true) {
        const Span& span = explainer.span(place);
        path.push_back({static_cast<int>(place.device), span, Wait::NOTHING});
        Step& step = path.back();
        if (span.start_ns == 0) break;
        const Place slot = explainer.slot_of(place);
        const Place before{slot.device, slot.position - 1};
        if (slot.position > 0 && explainer.span(before).end_ns == span.start_ns) {
            step.wait = Wait::ROW;
            place = before;
        } else {
            const Arrival last = explainer.last_arrival(slot);
            place = last.sender;
            step.wait = last.end_ns == span.start_ns ? Wait::INPUT : Wait::TRANSFER;
        }
    }
    std::ranges::reverse(path);
    return path;
}

}  // namespace pykern
