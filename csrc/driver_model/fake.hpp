// Calls by which rehearsals and tests tell and ask the fake driver. Arguments are plain, so that
// ctypes can pass them. The library of the tests has more calls: tests/fake_cuda/controls.hpp.
//
// The fake is a checking model: no function of it runs work when it is issued. Work runs later, in
// a random order that the streams and events allow, and whatever is not ordered by them is told
// as a violation, in whichever order it happened to run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/api.hpp"

#define PYKERN_FAKE_EXPORT __attribute__((visibility("default")))

extern "C" {

// A range of bytes that work reads or writes.
struct FakeAccess {
    pykern::cuda::CUdeviceptr address;
    std::size_t bytes;
    int writes;
};

// A new model: devices 0 to num_devices - 1, each of 132 multiprocessors, all of them peers.
// Handles made before are unknown from here on, and work that has not run never will.
PYKERN_FAKE_EXPORT void fake_reset(int num_devices, std::uint64_t seed);

PYKERN_FAKE_EXPORT void fake_set_peer(int device, int peer, int reachable);

// Whether work may touch memory that was never declared, as tests do. At first it may not.
PYKERN_FAKE_EXPORT void fake_allow_undeclared(int allowed);

// Work on a stream that touches these ranges: what a callback did at the time of the call.
PYKERN_FAKE_EXPORT void fake_kernel(pykern::cuda::CUstream stream, double duration_ns,
                                    const FakeAccess* accesses, std::size_t num_accesses);
PYKERN_FAKE_EXPORT void fake_run_all();
// From here on, waiting for an event that was last recorded before is a violation.
PYKERN_FAKE_EXPORT void fake_begin_step();

// Asked at the end. A text lives until the next call of the same function.
PYKERN_FAKE_EXPORT int fake_violations();
PYKERN_FAKE_EXPORT const char* fake_violation(int index);
// Calls of a function of the driver since the reset.
PYKERN_FAKE_EXPORT std::uint64_t fake_calls(const char* function);
}
