// Streams, events, copies.
#include <cstring>
#include <memory>
#include <utility>

#include "driver_model/entry.hpp"

namespace pykern::fake {
namespace {

// Both were recorded with times on one device, and are reached.
CUresult elapsed(Model& model, const Event& start, const Event& end, float* milliseconds) {
    if (!start.timed || !end.timed) model.refuse("an event has no time", kInvalidHandle);
    if (start.mark == nullptr || end.mark == nullptr) {
        model.refuse("an event was never recorded", kInvalidHandle);
    }
    if (start.device != end.device) {
        model.refuse("the events are of different devices", kInvalidHandle);
    }
    if (!start.mark->done || !end.mark->done) return kNotReady;
    *milliseconds = static_cast<float>((end.mark->time_ns - start.mark->time_ns) / 1e6);
    return kSuccess;
}

}  // namespace

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int /*priority*/) {
    return call("cuStreamCreateWithPriority", Call::kPlain, [&](Model& model) {
        if (flags != kStreamNonBlocking) {
            model.violations.add("the stream blocks on the default stream");
        }
        *stream = model.streams.add(model.make_stream(model.current_context()));
        return kSuccess;
    });
}

CUresult cuStreamDestroy(CUstream stream) {
    return call("cuStreamDestroy", Call::kRelease, [&](Model& model) {
        model.stream(stream);
        model.streams.remove(stream);
        return kSuccess;
    });
}

CUresult cuStreamSynchronize(CUstream stream) {
    return call("cuStreamSynchronize", Call::kPlain, [&](Model& model) {
        model.current_context();
        model.require_safe_beside_captures();
        const Stream& its = model.stream(stream);
        model.require_reached(model.schedule.complete(its));
        model.log.add("host stream", its.index);
        model.host_waits_for(its.clock, its.end_ns);
        return kSuccess;
    });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return call("cuStreamWaitEvent", Call::kWork, [&](Model& model) {
        model.current_context();
        if (flags != 0) model.refuse("flags must be 0", kInvalidValue);
        const bool dropped = model.waits_to_drop == 1;
        if (model.waits_to_drop > 0) --model.waits_to_drop;
        if (!dropped) model.wait(model.stream(stream), model.event(event));
        return kSuccess;
    });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
    return call("cuEventCreate", Call::kPlain, [&](Model& model) {
        if ((flags & ~kEventDisableTiming) != 0) {
            model.refuse("flags that are not modelled", kInvalidValue);
        }
        const CUcontext now = model.current_context();
        *event = model.events.add(std::make_shared<Event>(
            Event{now, flags == kEventTimed, model.context(now).device, nullptr, 0}));
        return kSuccess;
    });
}

CUresult cuEventDestroy(CUevent event) {
    return call("cuEventDestroy", Call::kRelease, [&](Model& model) {
        model.event(event);
        model.events.remove(event);
        return kSuccess;
    });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return call("cuEventRecord", Call::kWork, [&](Model& model) {
        model.current_context();
        model.record(model.stream(stream), model.event(event));
        return kSuccess;
    });
}

CUresult cuEventQuery(CUevent event) {
    return call("cuEventQuery", Call::kPlain, [&](Model& model) {
        model.current_context();
        const Event& its = model.event(event);
        const auto mark = its.mark;
        model.require_safe_beside_captures();
        if (mark == nullptr) return kSuccess;
        if (!mark->done) return kNotReady;
        model.log.add("host event", its.number);
        model.host_waits_for(mark->clock, mark->time_ns);
        return kSuccess;
    });
}

CUresult cuEventSynchronize(CUevent event) {
    return call("cuEventSynchronize", Call::kPlain, [&](Model& model) {
        model.current_context();
        model.require_safe_beside_captures();
        const Event& its = model.event(event);
        const auto mark = its.mark;
        if (mark == nullptr) return kSuccess;
        model.require_reached(model.schedule.run_until([&] { return mark->done; }));
        model.log.add("host event", its.number);
        model.host_waits_for(mark->clock, mark->time_ns);
        return kSuccess;
    });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return call("cuEventElapsedTime", Call::kPlain, [&](Model& model) {
        model.current_context();
        return elapsed(model, model.event(start), model.event(end), milliseconds);
    });
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    return call("cuThreadExchangeStreamCaptureMode", Call::kPlain, [&](Model& model) {
        if (*mode < 0 || *mode > kCaptureRelaxed) model.refuse("no such mode", kInvalidValue);
        std::swap(model.capture_modes[std::this_thread::get_id()], *mode);
        return kSuccess;
    });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    return call("cuMemcpyAsync", Call::kWork, [&](Model& model) {
        model.current_context();
        Stream& its = model.stream(stream);
        model.count_if_staged(its, to, from);
        const bool pageable = model.memory.is_pageable(to) || model.memory.is_pageable(from);
        if (pageable) model.require_safe_beside_captures();
        // A copy may be issued while any device is current.
        model.issue(its, model.copy_work(to, from, bytes), model.copy_cost.duration_ns(bytes));
        model.finish_pageable(its, to, from);
        return kSuccess;
    });
}

}  // namespace pykern::fake
