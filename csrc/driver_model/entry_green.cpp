// Green contexts: a device's multiprocessors in groups.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "driver_model/entry.hpp"

namespace pykern::fake {
namespace {

constexpr unsigned kGranularity = 8;

// A resource carries its group in the bytes that only the driver uses.
DevResource resource_of(const Group& group) {
    DevResource resource{};
    resource.type = kResourceTypeSm;
    resource.sm = {group.count, kGranularity, kGranularity};
    std::memcpy(resource.internal_padding.data(), &group, sizeof group);
    return resource;
}

Group group_of(Model& model, const DevResource& resource) {
    if (resource.type != kResourceTypeSm) {
        model.refuse("a resource that is not multiprocessors", kInvalidResourceType);
    }
    Group group;
    std::memcpy(&group, resource.internal_padding.data(), sizeof group);
    return group;
}

void check_apart(Model& model, const Group& group) {
    for (const auto& [handle, green] : model.greens.all()) {
        const Group& other = green->group;
        if (other.device == group.device && other.first < group.first + group.count &&
            group.first < other.first + other.count) {
            model.violations.add("multiprocessors " + std::to_string(group.first) + " to " +
                                 std::to_string(group.first + group.count - 1) + " of device " +
                                 std::to_string(group.device) + " are in another green context");
            return;
        }
    }
}

}  // namespace

CUresult cuDeviceGetDevResource(CUdevice device, DevResource* resource, int type) {
    return call("cuDeviceGetDevResource", Call::kPlain, [&](Model& model) {
        model.device(device);
        if (type != kResourceTypeSm) {
            model.refuse("a resource that is not multiprocessors", kInvalidResourceType);
        }
        *resource = resource_of({device, 0, kNumMultiprocessors});
        return kSuccess;
    });
}

CUresult cuDevSmResourceSplitByCount(DevResource* groups, unsigned* num_groups,
                                     const DevResource* whole, DevResource* rest, unsigned flags,
                                     unsigned min_count) {
    return call("cuDevSmResourceSplitByCount", Call::kPlain, [&](Model& model) {
        if (flags != 0) model.refuse("flags are not modelled", kInvalidValue);
        const Group all = group_of(model, *whole);
        const unsigned wanted = std::max(min_count, 1U);
        const unsigned size = (wanted + kGranularity - 1) / kGranularity * kGranularity;
        if (size > all.count) return kInvalidResourceConfiguration;
        const unsigned most = all.count / size;
        *num_groups = groups == nullptr ? most : std::min(*num_groups, most);
        if (groups == nullptr) return kSuccess;
        unsigned first = all.first;
        for (unsigned i = 0; i < *num_groups; ++i, first += size) {
            groups[i] = resource_of({all.device, first, size});
        }
        if (rest != nullptr)
            *rest = resource_of({all.device, first, all.first + all.count - first});
        return kSuccess;
    });
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description, DevResource* resources,
                                   unsigned num_resources) {
    return call("cuDevResourceGenerateDesc", Call::kPlain, [&](Model& model) {
        if (num_resources != 1) model.refuse("only one resource is modelled", kInvalidValue);
        *description = model.descriptions.add(std::make_shared<Group>(group_of(model, *resources)));
        return kSuccess;
    });
}

CUresult cuGreenCtxCreate(CUgreenCtx* green, CUdevResourceDesc description, CUdevice device,
                          unsigned flags) {
    return call("cuGreenCtxCreate", Call::kPlain, [&](Model& model) {
        const auto group = model.descriptions.find(description);
        if (group == nullptr) model.refuse("a description that is unknown", kInvalidHandle);
        if (flags != kGreenCtxDefaultStream) {
            model.refuse("the flag for the default stream is required", kInvalidValue);
        }
        if (group->device != device) {
            model.refuse("the multiprocessors are of another device", kInvalidDevice);
        }
        check_apart(model, *group);
        model.retain(device);
        const CUcontext context =
            model.contexts.add(std::make_shared<Context>(Context{device, true, nullptr}));
        *green = model.greens.add(std::make_shared<Green>(Green{*group, context}));
        return kSuccess;
    });
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    return call("cuGreenCtxDestroy", Call::kRelease, [&](Model& model) {
        const Green& its = model.green(green);
        model.contexts.remove(its.context);
        model.release(its.group.device);
        model.greens.remove(green);
        return kSuccess;
    });
}

CUresult cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx green) {
    return call("cuCtxFromGreenCtx", Call::kPlain, [&](Model& model) {
        *context = model.green(green).context;
        return kSuccess;
    });
}

CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx green, unsigned flags,
                                int /*priority*/) {
    return call("cuGreenCtxStreamCreate", Call::kPlain, [&](Model& model) {
        if (flags != kStreamNonBlocking) {
            model.refuse("the flag for a stream that does not block is required", kInvalidValue);
        }
        *stream = model.streams.add(model.make_stream(model.green(green).context));
        return kSuccess;
    });
}

}  // namespace pykern::fake
