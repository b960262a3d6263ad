// Action: the atom of a plan. One kind of work on one stage for one microbatch, or a slice of one.
#pragma once

#include <compare>
#include <cstdint>

namespace pykern {

// F forward, R recompute, B full backward, I input gradient, W weight gradient, U update; transfers
// COPY_F and COPY_B; REDUCE sums gradients over replicas; OFFLOAD moves an activation to host
// memory and LOAD brings it back. The zero-bubble papers write B for our I.
enum class Kind : std::uint8_t { F, R, B, I, W, U, COPY_F, COPY_B, REDUCE, OFFLOAD, LOAD };

inline constexpr int kNumKinds = 11;

// Eight bytes, so that a plan of a million actions stays in cache-friendly reach.
struct Action {
    std::uint32_t microbatch = 0;
    std::uint16_t stage = 0;
    Kind kind = Kind::F;
    std::uint8_t slice = 0;

    friend constexpr auto operator<=>(const Action&, const Action&) = default;
};

constexpr Action with_kind(Action action, Kind kind) {
    action.kind = kind;
    return action;
}

// The action of these numbers, or std::invalid_argument where one does not fit.
Action make_action(Kind kind, std::int64_t stage, std::int64_t microbatch, std::int64_t slice = 0);

}  // namespace pykern
