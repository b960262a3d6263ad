// Action: the atom of a plan. One kind of work on one stage for one microbatch.
#pragma once

#include <compare>
#include <cstdint>

namespace pykern {

// F forward, R recompute, B full backward, I input gradient, W weight gradient, U update; transfers
// COPY_F and COPY_B; REDUCE sums gradients over replicas. The zero-bubble papers write B for our I.
enum class Kind : std::uint8_t { F, R, B, I, W, U, COPY_F, COPY_B, REDUCE };

inline constexpr int kNumKinds = 9;

// Eight bytes, so that a plan of a million actions stays in cache-friendly reach.
struct Action {
    std::uint32_t microbatch = 0;
    std::uint16_t stage = 0;
    Kind kind = Kind::F;

    friend constexpr auto operator<=>(const Action&, const Action&) = default;
};

// The action of these numbers, or std::invalid_argument where one does not fit.
Action make_action(Kind kind, std::int64_t stage, std::int64_t microbatch);

}  // namespace pykern
