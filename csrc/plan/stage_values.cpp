#include "plan/stage_values.hpp"

#include <cmath>
#include <cstddef>
#include <stdexcept>

namespace pykern {

namespace {

void require_value(const std::string& name, double value) {
    if (!std::isfinite(value) || value < 0) {
        throw std::invalid_argument(name + " must be finite and not negative, got " +
                                    std::to_string(value));
    }
}

}  // namespace

void require_values(const std::string& name, const StageValues& values) {
    if (const auto* value = std::get_if<double>(&values)) {
        require_value(name, *value);
        return;
    }
    const auto& list = std::get<std::vector<double>>(values);
    for (std::size_t stage = 0; stage < list.size(); ++stage) {
        require_value(name + " of stage " + std::to_string(stage), list[stage]);
    }
}

void require_stages(const std::string& name, const StageValues& values, int num_stages) {
    const auto* list = std::get_if<std::vector<double>>(&values);
    if (list == nullptr || list->size() == static_cast<std::size_t>(num_stages)) return;
    throw std::invalid_argument(name + " must hold one value for each of " +
                                std::to_string(num_stages) + " stages, got " +
                                std::to_string(list->size()));
}

}  // namespace pykern
