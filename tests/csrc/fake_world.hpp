// A fresh fake driver for one test, which in the end has broken no rule and left nothing.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "cuda/lasting.hpp"
#include "fake.hpp"

class FakeWorld {
   public:
    explicit FakeWorld(int num_devices) { fake_reset(num_devices, 0); }
    ~FakeWorld() {
        for (int i = 0; i < fake_violations(); ++i) FAIL_CHECK(std::string(fake_violation(i)));
        pykern::cuda::destroy_idle_streams();
        CHECK(std::string(fake_leaks()).empty());
    }
    FakeWorld(const FakeWorld&) = delete;
    FakeWorld& operator=(const FakeWorld&) = delete;
};
