// Fresh fake drivers for tests.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "cuda/lasting.hpp"
#include "fake_cuda/controls.hpp"

// A fresh fake driver, to which no stream of the last one is left.
inline void reset_world(int num_devices, std::uint64_t seed) {
    pykern::cuda::destroy_idle_streams();
    fake_reset(num_devices, seed);
}

// A world for one test, which in the end has broken no rule and left nothing.
class FakeWorld {
   public:
    explicit FakeWorld(int num_devices) { reset_world(num_devices, 0); }
    // NOLINTNEXTLINE(bugprone-exception-escape): only REQUIRE throws
    ~FakeWorld() {
        for (int i = 0; i < fake_violations(); ++i) FAIL_CHECK(std::string(fake_violation(i)));
        pykern::cuda::destroy_idle_streams();
        CHECK(std::string(fake_leaks()).empty());
    }
    FakeWorld(const FakeWorld&) = delete;
    FakeWorld& operator=(const FakeWorld&) = delete;
};
