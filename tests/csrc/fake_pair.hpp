// Two devices of the fake driver and a ring slot between them: device 0 sends, device 1 receives.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "fake_world.hpp"

namespace pykern {

template <class Bytes>
cuda::CUdeviceptr address_of(Bytes& bytes) {
    return std::bit_cast<cuda::CUdeviceptr>(bytes.data());
}

inline cuda::Api fake_api() {
    cuda::Api api;
#define PYKERN_FAKE_FUNCTION(name, version, parameters) \
    api.name = reinterpret_cast<decltype(api.name)>(fake_function(#name));
    PYKERN_CUDA_FUNCTIONS(PYKERN_FAKE_FUNCTION)
#undef PYKERN_FAKE_FUNCTION
    return api;
}

struct FakePair {
    explicit FakePair(std::uint64_t seed) {
        reset_world(2, seed);
        api.cuInit(0);
        sender = make_stream(0);
        ready = make_event(context[0], cuda::kEventDisableTiming);
        receiver = make_stream(1);
        free = make_event(context[1], cuda::kEventDisableTiming);
        fake_alloc(address_of(source), sizeof source, sender);
        fake_alloc(address_of(slot), sizeof slot, receiver);
        api.cuEventRecord(free, receiver);
    }

    cuda::CUstream make_stream(std::size_t device) {
        api.cuDevicePrimaryCtxRetain(&context[device], static_cast<int>(device));
        api.cuCtxSetCurrent(context[device]);
        cuda::CUstream stream = nullptr;
        api.cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0);
        return stream;
    }

    cuda::CUevent make_event(cuda::CUcontext owner, unsigned flags) const {
        api.cuCtxSetCurrent(owner);
        cuda::CUevent event = nullptr;
        api.cuEventCreate(&event, flags);
        return event;
    }

    // Device 0 writes the slot, as soon as it is free if it waits for that.
    void send(bool waits) const {
        if (waits) api.cuStreamWaitEvent(sender, free, 0);
        api.cuMemcpyAsync(std::bit_cast<cuda::CUdeviceptr>(slot.data()),
                          std::bit_cast<cuda::CUdeviceptr>(source.data()), sizeof slot, sender);
        api.cuEventRecord(ready, sender);
    }

    // Device 1 reads the slot and frees it.
    void receive() const {
        api.cuStreamWaitEvent(receiver, ready, 0);
        touch_slot(receiver, false);
        api.cuEventRecord(free, receiver);
    }

    void touch_slot(cuda::CUstream stream, bool writes) const {
        const FakeAccess access{std::bit_cast<cuda::CUdeviceptr>(slot.data()), sizeof slot,
                                writes ? 1 : 0};
        fake_kernel(stream, 1000, &access, 1);
    }

    static std::vector<std::string> violations() {
        std::vector<std::string> texts;
        texts.reserve(static_cast<std::size_t>(fake_violations()));
        for (int i = 0; i < fake_violations(); ++i) texts.emplace_back(fake_violation(i));
        return texts;
    }

    static std::size_t violations_about(const std::string& words) {
        const auto texts = violations();
        return static_cast<std::size_t>(std::count_if(
            texts.begin(), texts.end(),
            [&](const std::string& text) { return text.find(words) != std::string::npos; }));
    }

    cuda::Api api = fake_api();
    std::array<cuda::CUcontext, 2> context{};
    cuda::CUstream sender = nullptr;
    cuda::CUstream receiver = nullptr;
    cuda::CUevent ready = nullptr;  // the slot can be read
    cuda::CUevent free = nullptr;   // the slot can be written
    std::array<std::uint8_t, 64> source{};
    std::array<std::uint8_t, 64> slot{};
};

}  // namespace pykern
