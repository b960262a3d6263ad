#include "plan/links.hpp"

#include <map>
#include <utility>

namespace pykern {

Links::Links(const Plan& plan) : placement_(plan.placement()) {
    const auto first_trained = static_cast<std::size_t>(plan.first_trained());
    std::map<std::pair<int, int>, int> numbers;
    const auto number_of = [&](int from, int to) {
        if (from == to) return kStays;
        const auto [entry, is_new] = numbers.try_emplace({from, to}, numbers.size());
        if (is_new) links_.push_back({from, to});
        return entry->second;
    };
    for (const Replica& devices : placement_.replicas()) {
        for (std::size_t stage = 0; stage < devices.size(); ++stage) {
            const bool last = stage + 1 == devices.size();
            forward_.push_back(last ? kStays : number_of(devices[stage], devices[stage + 1]));
            // Numbered also where nothing goes over it, so that a pipeline's plans agree on lanes.
            const int back = stage == 0 ? kStays : number_of(devices[stage], devices[stage - 1]);
            backward_.push_back(stage <= first_trained ? kStays : back);
        }
    }
}

}  // namespace pykern
