#include "cuda/objects.hpp"

#include "cuda/device.hpp"

namespace pykern::cuda {

CurrentContext::CurrentContext(CUcontext context) {
    driver::cuCtxGetCurrent(&before_);
    driver::cuCtxSetCurrent(context);
}

// NOLINTNEXTLINE(bugprone-exception-escape): the driver was loaded for the context
CurrentContext::~CurrentContext() { api().cuCtxSetCurrent(before_); }

Stream make_stream(CUcontext context, int priority) {
    const CurrentContext current(context);
    CUstream stream = nullptr;
    driver::cuStreamCreateWithPriority(&stream, kStreamNonBlocking, priority);
    return Stream(stream, {context});
}

Event make_event(CUcontext context, unsigned flags) {
    const CurrentContext current(context);
    CUevent event = nullptr;
    driver::cuEventCreate(&event, flags);
    return Event(event, {context});
}

PrimaryContext::PrimaryContext(int device) : device_(device) {
    const CUdevice found = find_device(device);
    CUcontext context = nullptr;
    driver::cuDevicePrimaryCtxRetain(&context, found);
    context_ = {context, ReleasePrimary{found}};
}

// NOLINTNEXTLINE(bugprone-exception-escape): the driver was loaded for the context
void ReleasePrimary::operator()(CUcontext /*context*/) const noexcept {
    if (origin.is_here()) api().cuDevicePrimaryCtxRelease(device);
}

}  // namespace pykern::cuda
