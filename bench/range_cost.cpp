// The cost of a range where no tool is attached. From the root, after make setup:
//   c++ -O3 -std=c++20 -Icsrc bench/range_cost.cpp build/cp3*/libpykern_core.a -ldl -o
//   build/range_cost build/range_cost
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "exec/ranges.hpp"

int main() {
    using Clock = std::chrono::steady_clock;
    constexpr std::uint32_t kRanges = 20'000'000;
    std::printf("with NVTX: %s\n", pykern::nvtx_built() ? "yes" : "no");
    for (int round = 0; round < 5; ++round) {
        const auto start = Clock::now();
        for (std::uint32_t i = 0; i < kRanges; ++i) {
            const pykern::Range range({.microbatch = i, .stage = 3, .kind = pykern::Kind::B}, 1);
        }
        const std::chrono::duration<double, std::nano> spent = Clock::now() - start;
        std::printf("%.2f ns\n", spent.count() / kRanges);
    }
}
