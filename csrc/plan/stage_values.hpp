// StageValues: one number for every stage, or one for each.
#pragma once

#include <string>
#include <variant>
#include <vector>

namespace pykern {

using StageValues = std::variant<double, std::vector<double>>;

inline double value_of(const StageValues& values, std::size_t stage) {
    if (const auto* value = std::get_if<double>(&values)) return *value;
    return std::get<std::vector<double>>(values)[stage];
}

// Throws std::invalid_argument unless every value is finite and not negative.
void require_values(const std::string& name, const StageValues& values);

// Throws std::invalid_argument where a list has other than `num_stages` values.
void require_stages(const std::string& name, const StageValues& values, int num_stages);

}  // namespace pykern
