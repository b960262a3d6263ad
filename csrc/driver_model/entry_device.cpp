// Devices, contexts, errors by name.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "driver_model/entry.hpp"

namespace pykern::fake {
namespace {

struct Error {
    CUresult error;
    const char* name;
    const char* text;
};

constexpr auto kErrors = std::to_array<Error>({
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kInvalidResourceType, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
    {kInvalidResourceConfiguration, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION",
     "invalid resource configuration"},
});

const Error* find_error(CUresult error) {
    const auto* const found =
        std::ranges::find_if(kErrors, [&](const Error& known) { return known.error == error; });
    return found == kErrors.end() ? nullptr : found;
}

}  // namespace

World& world() {
    static World the_world;
    return the_world;
}

CUresult cuInit(unsigned /*flags*/) {
    {
        const std::scoped_lock lock(world().mutex);
        world().initialised = true;
    }
    return call("cuInit", Call::kPlain, [](Model&) { return kSuccess; });
}

CUresult cuDriverGetVersion(int* version) {
    return call("cuDriverGetVersion", Call::kPlain, [&](Model&) {
        *version = world().driver_version;
        return kSuccess;
    });
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    const Error* const found = find_error(error);
    *name = found == nullptr ? nullptr : found->name;
    return found == nullptr ? kInvalidValue : kSuccess;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    const Error* const found = find_error(error);
    *text = found == nullptr ? nullptr : found->text;
    return found == nullptr ? kInvalidValue : kSuccess;
}

CUresult cuDeviceGetCount(int* count) {
    return call("cuDeviceGetCount", Call::kPlain, [&](Model& model) {
        *count = static_cast<int>(model.devices.size());
        return kSuccess;
    });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return call("cuDeviceGet", Call::kPlain, [&](Model& model) {
        model.device(ordinal);
        *device = ordinal;
        return kSuccess;
    });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    return call("cuDeviceGetName", Call::kPlain, [&](Model& model) {
        model.device(device);
        const std::string text = "fake device " + std::to_string(device);
        const auto room = static_cast<std::size_t>(std::max(length, 1)) - 1;
        name[text.copy(name, room)] = '\0';
        return kSuccess;
    });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    return call("cuDeviceGetAttribute", Call::kPlain, [&](Model& model) {
        model.device(device);
        if (attribute != kAttributeMultiprocessorCount) {
            model.refuse("attribute " + std::to_string(attribute) + " is not modelled",
                         kInvalidValue);
        }
        *value = kNumMultiprocessors;
        return kSuccess;
    });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return call("cuDeviceCanAccessPeer", Call::kPlain, [&](Model& model) {
        model.device(device);
        model.device(peer);
        *can = device != peer && !model.unreachable.contains({device, peer}) ? 1 : 0;
        return kSuccess;
    });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return call("cuDevicePrimaryCtxRetain", Call::kPlain, [&](Model& model) {
        *context = model.retain(device);
        return kSuccess;
    });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return call("cuDevicePrimaryCtxRelease", Call::kRelease, [&](Model& model) {
        model.release(device);
        return kSuccess;
    });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    return call("cuCtxGetCurrent", Call::kPlain, [&](Model& model) {
        *context = model.current[std::this_thread::get_id()];
        return kSuccess;
    });
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return call("cuCtxSetCurrent", Call::kPlain, [&](Model& model) {
        if (context != nullptr) model.context(context);
        model.current[std::this_thread::get_id()] = context;
        return kSuccess;
    });
}

CUresult cuCtxSynchronize() {
    return call("cuCtxSynchronize", Call::kPlain, [](Model& model) {
        const CUcontext now = model.current_context();
        // In any mode of the thread, its wait would be for a stream that is captured.
        if (model.capturing || model.captures_alone) {
            model.refuse("a capture of another thread is broken", kCaptureUnsupported);
        }
        const Context& its = model.context(now);
        for (const auto& stream : model.schedule.streams()) {
            // The primary context synchronises the green ones of its device as well.
            if (stream->context != now && (its.green || stream->device != its.device)) continue;
            model.require_reached(model.schedule.complete(*stream));
            model.log.add("host stream", stream->index);
            model.host_waits_for(stream->clock, stream->end_ns);
        }
        return kSuccess;
    });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    return call("cuCtxEnablePeerAccess", Call::kPlain, [&](Model& model) {
        if (flags != 0) model.refuse("flags must be 0", kInvalidValue);
        const CUcontext now = model.current_context();
        const int device = model.context(now).device;
        const int other = model.context(peer).device;
        if (now == peer) model.refuse("a context is no peer of itself", kInvalidContext);
        if (model.unreachable.contains({device, other})) return kPeerAccessUnsupported;
        return model.peers.emplace(now, peer).second ? kSuccess : kPeerAccessAlreadyEnabled;
    });
}

}  // namespace pykern::fake
