// Require: bad numbers are refused before any work starts, naming the value and the rule.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pykern {

// Throws std::invalid_argument unless `least` <= value <= `most`.
inline void require_range(const char* name, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
    if (value < least || value > most) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) +
                                    " to " + std::to_string(most) + ", got " +
                                    std::to_string(value));
    }
}

}  // namespace pykern
