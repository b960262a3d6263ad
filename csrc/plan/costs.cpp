#include "plan/costs.hpp"

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace pykern {

namespace {

void require_time(const std::string& name, double time_ns) {
    if (!std::isfinite(time_ns) || time_ns < 0) {
        throw std::invalid_argument(name + " must be finite and not negative, got " +
                                    std::to_string(time_ns));
    }
}

void require_times(const std::string& name, const StageTimes& times) {
    if (const auto* time_ns = std::get_if<double>(&times)) {
        require_time(name, *time_ns);
        return;
    }
    const auto& list = std::get<std::vector<double>>(times);
    for (std::size_t stage = 0; stage < list.size(); ++stage) {
        require_time(name + " of stage " + std::to_string(stage), list[stage]);
    }
}

void require_length(const std::string& name, const StageTimes& times, int num_stages) {
    const auto* list = std::get_if<std::vector<double>>(&times);
    if (list == nullptr || list->size() == static_cast<std::size_t>(num_stages)) return;
    throw std::invalid_argument(name + " must hold one time for each of " +
                                std::to_string(num_stages) + " stages, got " +
                                std::to_string(list->size()));
}

}  // namespace

Costs::Costs(StageTimes forward_ns, StageTimes backward_ns, double transfer_ns)
    : forward_ns_(std::move(forward_ns)),
      backward_ns_(std::move(backward_ns)),
      transfer_ns_(transfer_ns) {
    require_times("forward_ns", forward_ns_);
    require_times("backward_ns", backward_ns_);
    require_time("transfer_ns", transfer_ns_);
}

double Costs::of(Action action) const {
    const StageTimes& times = action.kind == Kind::F ? forward_ns_ : backward_ns_;
    if (const auto* time_ns = std::get_if<double>(&times)) return *time_ns;
    return std::get<std::vector<double>>(times)[action.stage];
}

void Costs::require_stages(int num_stages) const {
    require_length("forward_ns", forward_ns_, num_stages);
    require_length("backward_ns", backward_ns_, num_stages);
}

}  // namespace pykern
