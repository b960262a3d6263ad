// Stage costs: the times of a stage's four operations, in the order of their symbols.
#pragma once

#include <array>
#include <cstdint>

#include "plan/action.hpp"
#include "plan/costs.hpp"

namespace pykern {

inline std::array<double, 4> op_times_ns(const Costs& costs, int stage) {
    const auto of = [&](Kind kind) {
        return costs.of(Action{0, static_cast<std::uint16_t>(stage), kind});
    };
    // Until Costs knows I and W, each is half of B.
    return {of(Kind::F), of(Kind::B) / 2, of(Kind::B) / 2, of(Kind::B)};
}

}  // namespace pykern
