#include "driver_model/model.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "driver_model/bytes.hpp"

namespace pykern::fake {
namespace {

// The object of a handle, or the end of the call.
template <class Handle, class Object>
Object& known(Model& model, const Handles<Handle, Object>& handles, Handle handle,
              const char* kind) {
    const std::shared_ptr<Object> object = handles.find(handle);
    if (object == nullptr) {
        model.refuse(std::string(kind) + " that is unknown or destroyed", kInvalidHandle);
    }
    return *object;
}

}  // namespace

Model::Model(int num_devices, std::uint64_t seed)
    : schedule(seed), devices(static_cast<std::size_t>(num_devices)) {}

void Model::refuse(const std::string& text, CUresult error) {
    violations.add(text);
    throw Refused(error);
}

Device& Model::device(int ordinal) {
    if (ordinal < 0 || ordinal >= static_cast<int>(devices.size())) {
        refuse("no device " + std::to_string(ordinal), kInvalidDevice);
    }
    return devices[static_cast<std::size_t>(ordinal)];
}

cuda::CUcontext Model::current_context() {
    const auto found = current.find(std::this_thread::get_id());
    if (found == current.end() || found->second == nullptr) {
        refuse("no context is current", kInvalidContext);
    }
    context(found->second);
    return found->second;
}

Context& Model::context(cuda::CUcontext handle) {
    return known(*this, contexts, handle, "a context");
}
Event& Model::event(cuda::CUevent handle) { return known(*this, events, handle, "an event"); }
Graph& Model::graph(cuda::CUgraph handle) { return known(*this, graphs, handle, "a graph"); }
Exec& Model::exec(cuda::CUgraphExec handle) {
    return known(*this, execs, handle, "an executable graph");
}
Green& Model::green(cuda::CUgreenCtx handle) {
    return known(*this, greens, handle, "a green context");
}

Group Model::group_of(const Stream& stream) const {
    for (const auto& [handle, green] : greens.all()) {
        if (green->context == stream.context) return green->group;
    }
    return {stream.device, 0, kNumMultiprocessors};
}

Stream& Model::stream(cuda::CUstream handle) {
    if (handle != nullptr) {
        Stream& its = known(*this, streams, handle, "a stream");
        if (contexts.find(its.context) == nullptr) {
            refuse("a stream of a context that is destroyed", kContextIsDestroyed);
        }
        return its;
    }
    const cuda::CUcontext now = current_context();
    Context& its = context(now);
    if (its.default_stream == nullptr) its.default_stream = make_stream(now);
    return *its.default_stream;
}

cuda::CUcontext Model::retain(int ordinal) {
    Device& its = device(ordinal);
    if (its.retained++ == 0) {
        its.primary = contexts.add(std::make_shared<Context>(Context{ordinal, false, nullptr}));
    }
    return its.primary;
}

void Model::release(int ordinal) {
    Device& its = device(ordinal);
    if (its.retained == 0) refuse("the context is not retained", kInvalidContext);
    if (--its.retained == 0) contexts.remove(std::exchange(its.primary, nullptr));
}

std::shared_ptr<Stream> Model::make_stream(cuda::CUcontext owner) {
    auto made = std::make_shared<Stream>();
    made->index = num_streams_++;
    made->context = owner;
    made->device = context(owner).device;
    schedule.add(made);
    return made;
}

void Model::make_room(const Stream& stream) {
    const auto has_room = [&] { return stream.queue.size() < most_queued; };
    if (has_room()) return;
    ++full_queues;
    // The host learns nothing of what is done by now.
    if (!schedule.run_until(has_room)) {
        refuse("the queue of stream " + std::to_string(stream.index) +
                   " is full, and the host waits for work that hangs",
               cuda::kNotReady);
    }
}

void Model::require_safe_beside_captures() {
    const auto here = std::this_thread::get_id();
    if (capture_modes[here] == cuda::kCaptureRelaxed) return;
    if (capturing) refuse("a capture of another thread is broken", kCaptureUnsupported);
    if (captures_alone == here) refuse("its own capture is broken", kCaptureUnsupported);
}

void Model::finish_pageable(const Stream& stream, cuda::CUdeviceptr to, cuda::CUdeviceptr from) {
    if (!memory.is_pageable(to) && !memory.is_pageable(from)) return;
    ++pageable_copies;
    require_reached(schedule.complete(stream));
    // Bytes from the host may be in the driver's own memory, and not have arrived.
    if (!memory.is_pageable(to)) return;
    log.add("host stream", stream.index);
    host_waits_for(stream.clock, stream.end_ns);
}

Site Model::issue(Stream& stream, Work work, double duration_ns) {
    make_room(stream);
    stream.clock.join(host);
    stream.end_ns = std::max(stream.end_ns, host_ns) + duration_ns;
    const Site site{violations.function(), stream.clock.advance(stream.index), stream.device};
    if (!work.accesses.empty()) log.add(work.accesses, "work", site.function, stream.index);
    for (const FakeAccess& access : work.accesses) {
        memory.touch(site, stream.clock, access);
        if (access.writes != 0) lent.give_back(access);
    }
    if (hangs_at > 0 && hangs_in == violations.function()) {
        --hangs_at;
        work.hangs = hangs_at == 0;
    }
    stream.queue.push_back(std::move(work));
    return site;
}

void Model::record(Stream& stream, Event& event) {
    if (event.context != stream.context) {
        refuse("the event is of another context than the stream", kInvalidHandle);
    }
    const auto mark = std::make_shared<Mark>();
    Work work;
    work.mark = mark;
    issue(stream, std::move(work), 0);
    this->mark(stream, event, mark);
}

void Model::mark(Stream& stream, Event& event, const std::shared_ptr<Mark>& mark) {
    mark->clock = stream.clock;
    mark->time_ns = stream.end_ns;
    mark->step = step;
    event.mark = mark;
    if (event.number == 0) event.number = ++num_events_;
    log.add("record", event.number, stream.index);
}

void Model::wait(Stream& stream, const Event& event) {
    if (event.mark == nullptr) {
        violations.add("the event was never recorded, so nothing is waited for");
        return;
    }
    if (event.mark->step != step) {
        violations.add("the event was not recorded in this step");
    }
    log.add("wait", event.number, stream.index);
    stream.clock.join(event.mark->clock);
    stream.end_ns = std::max(stream.end_ns, event.mark->time_ns);
    Work work;
    work.waits_for = event.mark;
    issue(stream, std::move(work), 0);
}

void Model::host_waits_for(const Clock& clock, double time_ns) {
    lent.give_back(clock);
    host.join(clock);
    host_ns = std::max(host_ns, time_ns);
}

void Model::require_reached(bool reached) {
    if (!reached) refuse("the host waits for work that hangs", cuda::kNotReady);
}

void Model::count_if_staged(const Stream& stream, cuda::CUdeviceptr to, cuda::CUdeviceptr from) {
    const auto reachable = [&](cuda::CUdeviceptr address) {
        const int owner = memory.device_of(address).value_or(stream.device);
        return owner == stream.device || std::ranges::any_of(peers, [&](const auto& pair) {
                   const auto mine = contexts.find(pair.first);
                   const auto other = contexts.find(pair.second);
                   return mine && other && mine->device == stream.device && other->device == owner;
               });
    };
    if (!reachable(to) || !reachable(from)) ++staged_copies;
}

Work Model::copy_work(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes) const {
    const auto sender = memory.device_of(from);
    const auto receiver = memory.device_of(to);
    const bool is_direct = sender && receiver && bytes > 0;
    const std::size_t lost = is_direct && corrupt.contains({*sender, *receiver}) ? 1 : 0;
    const std::size_t arrives = bytes - lost;
    Work work;
    work.run = [=] { std::memmove(bytes_at(to), bytes_at(from), arrives); };
    work.accesses = {{from, bytes, 0}, {to, bytes, 1}};
    return work;
}

void Model::drop_work() {
    schedule.drop_all();
    log.add("host all");
    for (const auto& stream : schedule.streams()) host_waits_for(stream->clock, stream->end_ns);
}

}  // namespace pykern::fake
