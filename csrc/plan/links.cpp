#include "plan/links.hpp"

#include <map>
#include <utility>

namespace pykern {

Links::Links(const Placement& placement) : placement_(placement) {
    std::map<std::pair<int, int>, int> numbers;
    const auto number_of = [&](int from, int to) {
        if (from == to) return kStays;
        const auto [entry, is_new] = numbers.try_emplace({from, to}, numbers.size());
        if (is_new) links_.push_back({from, to});
        return entry->second;
    };
    for (const Replica& devices : placement.replicas()) {
        for (std::size_t stage = 0; stage < devices.size(); ++stage) {
            const bool last = stage + 1 == devices.size();
            forward_.push_back(last ? kStays : number_of(devices[stage], devices[stage + 1]));
            backward_.push_back(stage == 0 ? kStays
                                           : number_of(devices[stage], devices[stage - 1]));
        }
    }
}

}  // namespace pykern
