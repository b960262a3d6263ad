// Devices, streams, events and memory, as torch asks a build with CUDA for them.
#pragma once

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "blocks.hpp"
#include "capture.hpp"
#include "host.hpp"

namespace oracle {

// By it autograd's engine enters devices and streams, and has streams wait for each other.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    using Device = c10::Device;
    using Stream = c10::Stream;

    c10::DeviceType type() const override { return c10::kCUDA; }
    // The engine makes its threads once, for as many as there can be.
    c10::DeviceIndex deviceCount() const noexcept override { return kMaxGpus; }

    Device getDevice() const override { return device_of(gpu); }
    void setDevice(Device device) const override { gpu = index_of(device); }
    void uncheckedSetDevice(Device device) const noexcept override { gpu = index_of(device); }
    Device exchangeDevice(Device device) const override {
        const Device before = getDevice();
        gpu = index_of(device);
        return before;
    }

    Stream getDefaultStream(Device device) const override {
        return Stream(Stream::UNSAFE, device_of(index_of(device)), 0);
    }
    Stream getStream(Device device) const override {
        const int index = index_of(device);
        return Stream(Stream::UNSAFE, device_of(index),
                      reinterpret_cast<c10::StreamId>(streams[index]));
    }
    Stream exchangeStream(Stream stream) const override {
        const Stream before = getStream(stream.device());
        streams[stream.device_index()] = reinterpret_cast<Handle>(stream.id());
        return before;
    }

    void record(void** event, const Stream& stream, c10::DeviceIndex device,
                c10::EventFlag) const override {
        TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of GPU ", device,
                    " is recorded on a stream of GPU ", stream.device_index());
        const Within within(stream.device_index());
        constexpr unsigned kDisableTiming = 2;
        if (*event == nullptr) driver.event_create(event, kDisableTiming);
        ++counts.records;
        const auto captured = [&](Capture& capture) { capture.record(*event, handle(stream)); };
        if (if_captured(handle(stream), captured)) return;
        forget(*event);
        driver.event_record(*event, handle(stream));
    }
    void block(void* event, const Stream& stream) const override {
        if (event == nullptr) return;
        const Within within(stream.device_index());
        ++counts.waits;
        {
            const std::lock_guard hold(captures.lock);
            const bool is_default = stream.id() == 0;
            if (captures.now && captures.now->wait(event, handle(stream), is_default)) return;
        }
        refuse_in_capture(handle(stream), "it waits for work that is not captured");
        driver.stream_wait(handle(stream), event, 0);
    }
    void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
        if (event == nullptr) return;
        const Within within(device);
        forget(event);
        driver.event_destroy(event);
    }
    bool queryEvent(void* event) const override {
        constexpr int kNotReady = 600;
        const Within within(gpu);
        const int error = event == nullptr ? 0 : driver.event_query(event);
        if (error != kNotReady) require_success(error);
        return error == 0;
    }
    // Any two events are a millisecond apart.
    double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
    void synchronizeEvent(void* event) const override {
        ++counts.host_waits;
        const Within within(gpu);
        require_success(driver.event_synchronize(event));
    }
    void synchronizeStream(const Stream& stream) const override {
        refuse_in_capture(handle(stream), "the host waits for the stream");
        ++counts.host_waits;
        const Within within(stream.device_index());
        require_success(driver.stream_synchronize(handle(stream)));
    }
    // It overrides nothing before torch 2.13.
    bool isStreamCapturing(const Stream& stream) const {
        return if_captured(handle(stream), [](const Capture&) {});
    }
    void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
        use_on(memory, handle(stream));
    }

   private:
    static void forget(void* event) {
        const std::lock_guard hold(captures.lock);
        if (captures.now) captures.now->forget(event);
    }
    static int index_of(Device device) { return device.has_index() ? device.index() : gpu; }
    static Handle handle(const Stream& stream) {
        return handle_of(stream.device_index(), reinterpret_cast<Handle>(stream.id()));
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    int getNumGPUs() const override { return driver.num_gpus; }
    c10::DeviceIndex deviceCount() const override {
        return static_cast<c10::DeviceIndex>(driver.num_gpus);
    }
    c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(gpu); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    void setCurrentDevice(c10::DeviceIndex device) const override { gpu = device; }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
    bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
    at::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(c10::kCUDA); }
    // The host's, so that numbers are those of a plain model on the CPU.
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::globalContext().defaultGenerator(c10::kCPU);
    }
};

// torch has made its hooks when this library is loaded. They have no members, so that the object
// that torch keeps gets these functions by its pointer to them.
inline void install_hooks() {
    static const Hooks hooks;
    const void* theirs = &at::detail::getCUDAHooks();
    *static_cast<const void**>(const_cast<void*>(theirs)) = *reinterpret_cast<void* const*>(&hooks);
}

// Attention as products and a softmax: there is no fused kernel for these GPUs.
inline std::int64_t attention_of(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>&, double, bool,
                                 std::optional<double>, bool) {
    return static_cast<std::int64_t>(at::SDPBackend::math);
}

}  // namespace oracle

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &oracle::attention_of)
}  // namespace at::native
