// Random: the same numbers on every machine, which the standard's distributions do not promise.
#pragma once

#include <bit>
#include <cstdint>

namespace pykern {

// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
   public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        state_ += 0x9e3779b97f4a7c15;
        std::uint64_t mixed = state_;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
        return mixed ^ (mixed >> 31);
    }
    // 0 to count - 1.
    std::size_t below(std::size_t count) {
        return static_cast<std::size_t>(((next() >> 32) * static_cast<std::uint64_t>(count)) >> 32);
    }
    bool chance(std::size_t percent) { return below(100) < percent; }
    // Exponentially distributed with mean `mean`, in whole numbers: -log2 of a uniform number, its
    // mantissa taken as a straight line, which is within 6 % and needs no library.
    std::int64_t exponential(std::int64_t mean) {
        const std::uint64_t uniform = next() | 1;
        const auto zeros = static_cast<unsigned>(std::countl_zero(uniform));
        const auto fraction = static_cast<std::int64_t>(((uniform << zeros) << 1) >> 48);
        const std::int64_t log2 = (std::int64_t{zeros} + 1) * 65536 - fraction;
        return mean * (log2 * 45426 / 65536) / 65536;  // 45426 / 65536 is ln 2
    }

   private:
    std::uint64_t state_;
};

}  // namespace pykern
