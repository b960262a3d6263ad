#include "controls.hpp"

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver_model/bytes.hpp"
#include "driver_model/entry.hpp"

using namespace pykern;  // NOLINT(google-build-using-namespace)
using fake::Model;
using fake::tell;

namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    // The finaliser of splitmix64 over both.
    hash = (hash ^ value) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    return hash ^ (hash >> 31);
}

void run_mix(std::uint64_t hash, const std::vector<FakeAccess>& accesses) {
    for (const FakeAccess& access : accesses) {
        for (std::size_t i = 0; access.writes == 0 && i < access.bytes; ++i) {
            hash = mix(hash, std::to_integer<std::uint64_t>(fake::bytes_at(access.address)[i]));
        }
    }
    for (const FakeAccess& access : accesses) {
        for (std::size_t i = 0; access.writes != 0 && i < access.bytes; ++i) {
            hash = mix(hash, i);
            fake::bytes_at(access.address)[i] = static_cast<std::byte>(hash & 0xff);
        }
    }
}

bool touches(const fake::Work& work, cuda::CUdeviceptr address, std::size_t bytes) {
    return std::ranges::any_of(work.accesses, [&](const FakeAccess& access) {
        return access.address < address + bytes && address < access.address + access.bytes;
    });
}

// Runs the work that touches these bytes.
void complete(fake::Schedule& schedule, cuda::CUdeviceptr address, std::size_t bytes) {
    for (const auto& stream : schedule.streams()) {
        const auto& queue = stream->queue;
        auto behind = queue.size();
        for (std::size_t i = 0; i < queue.size(); ++i) {
            if (touches(queue[i], address, bytes)) behind = queue.size() - i - 1;
        }
        schedule.run_until([&] { return queue.size() <= behind; });
    }
}

// Ends a launch while a context of another device than the stream's is current.
void require_device_of(Model& model, const fake::Stream& stream) {
    const int now = model.context(model.current_context()).device;
    if (now != stream.device) {
        model.refuse("a launch on a stream of device " + std::to_string(stream.device) +
                         ", while device " + std::to_string(now) + " is current",
                     fake::kInvalidHandle);
    }
}

std::string leaks(const Model& model) {
    std::ostringstream text;
    for (const auto& [handle, stream] : model.streams.all()) {
        text << "stream " << stream->index << " on device " << stream->device << "\n";
    }
    for (const auto& [handle, event] : model.events.all()) {
        text << "event of device " << event->device << "\n";
    }
    for (const auto& [handle, graph] : model.graphs.all()) {
        if (!graph->captured) text << "graph of " << graph->nodes.size() << " nodes\n";
    }
    for (const auto& [handle, exec] : model.execs.all()) {
        text << "executable graph of " << exec->nodes->size() << " nodes\n";
    }
    for (const auto& [handle, green] : model.greens.all()) {
        text << "green context of " << green->group.count << " multiprocessors on device "
             << green->group.device << "\n";
    }
    for (std::size_t i = 0; i < model.devices.size(); ++i) {
        if (model.devices[i].retained != 0) {
            text << "primary context of device " << i << ", retained " << model.devices[i].retained
                 << " times\n";
        }
    }
    return text.str();
}

cuda::CUgraph make_captured(Model& model, fake::Node node) {
    auto graph = std::make_shared<fake::Graph>();
    graph->captured = true;
    graph->add(std::move(node));
    return model.graphs.add(std::move(graph));
}

}  // namespace

void* fake_function(const char* name) {
    return tell("fake_function", [&](Model& model) { return fake::known_function(model, name); });
}

void fake_make_default(cuda::CUstream stream) {
    tell("fake_make_default", [&](Model& model) {
        fake::Stream& its = model.stream(stream);
        model.context(its.context).default_stream = its.shared_from_this();
    });
}

void fake_set_eagerness(double probability) {
    tell("fake_set_eagerness", [&](Model& model) {
        if (probability < 0 || probability > 1) {
            model.refuse("a probability is from 0 to 1", cuda::kInvalidValue);
        }
        model.schedule.set_eagerness(probability);
    });
}

void fake_set_corrupt(int device, int peer, int corrupt) {
    tell("fake_set_corrupt", [&](Model& model) {
        model.device(device);
        model.device(peer);
        if (corrupt != 0) {
            model.corrupt.emplace(device, peer);
        } else {
            model.corrupt.erase({device, peer});
        }
    });
}

void fake_set_copy_cost(double latency_ns, double bytes_per_ns) {
    tell("fake_set_copy_cost", [&](Model& model) { model.copy_cost = {latency_ns, bytes_per_ns}; });
}

void fake_set_driver_version(int version) {
    tell("fake_set_driver_version", [&](Model&) { fake::world().driver_version = version; });
}

void fake_alloc(cuda::CUdeviceptr address, std::size_t bytes, cuda::CUstream owner) {
    tell("fake_alloc", [&](Model& model) {
        model.memory.allocate(address, bytes, model.stream(owner).shared_from_this());
    });
}

void fake_place_on_host(cuda::CUdeviceptr address, int pinned) {
    tell("fake_place_on_host", [&](Model& model) {
        if (!model.memory.is_allocated(address)) {
            model.refuse("memory that is not allocated, or not its start", cuda::kInvalidValue);
        }
        model.memory.place_on_host(address, pinned != 0);
    });
}

void fake_lend(cuda::CUstream stream, cuda::CUdeviceptr address, std::size_t bytes) {
    tell("fake_lend", [&](Model& model) {
        const fake::Stream& its = model.stream(stream);
        const fake::Site last{"cuMemcpyAsync", its.clock.last(its.index), its.device};
        model.lent.lend(last, address, bytes);
    });
}

void fake_free(cuda::CUdeviceptr address) {
    tell("fake_free", [&](Model& model) {
        if (!model.memory.is_allocated(address)) {
            model.refuse("memory that is not allocated, or not its start", cuda::kInvalidValue);
        }
        // The bytes are gone after this call, so what touches them runs now; that orders nothing.
        complete(model.schedule, address, model.memory.bytes_at(address));
        model.log.add("free", model.memory.owner_of(address), address,
                      model.memory.bytes_at(address));
        model.memory.free(address, model.host);
    });
}

void fake_forget(cuda::CUdeviceptr address) {
    tell("fake_forget", [&](Model& model) {
        if (!model.memory.is_freed(address)) {
            model.refuse("memory that was not freed", cuda::kInvalidValue);
        }
        model.log.add("forget", address, model.memory.bytes_at(address));
        model.memory.forget(address);
    });
}

void fake_launch(cuda::CUstream stream, double duration_ns, const FakeAccess* accesses,
                 std::size_t num_accesses) {
    tell("fake_launch", [&](Model& model) {
        fake::Work work;
        work.accesses.assign(accesses, accesses + num_accesses);
        require_device_of(model, model.stream(stream));
        model.issue(model.stream(stream), std::move(work), duration_ns);
        model.schedule.run_some();
    });
}

void fake_order(cuda::CUstream before, cuda::CUstream after) {
    tell("fake_order", [&](Model& model) {
        fake::Event event;
        event.context = model.stream(before).context;
        model.record(model.stream(before), event);
        model.wait(model.stream(after), event);
    });
}

int fake_complete(cuda::CUstream stream) {
    return tell("fake_complete", [&](Model& model) {
        return model.schedule.complete(model.stream(stream)) ? 1 : 0;
    });
}

void fake_keep_log(int kept) {
    tell("fake_keep_log", [&](Model& model) { model.log.keep(kept != 0); });
}

const char* fake_log() {
    static std::string text;
    return tell("fake_log", [&](Model& model) {
        text = model.log.text();
        return text.c_str();
    });
}

cuda::CUgraph fake_make_graph(double duration_ns, void (*run)(void*), void* argument) {
    return tell("fake_make_graph", [&](Model& model) {
        return make_captured(model, {duration_ns, [=] { run(argument); }, {}, {}});
    });
}

void fake_graph_access(cuda::CUgraph graph, cuda::CUdeviceptr address, std::size_t bytes,
                       int writes) {
    tell("fake_graph_access", [&](Model& model) {
        fake::Graph& its = model.graph(graph);
        if (!its.captured) model.refuse("a graph that is not captured", cuda::kInvalidValue);
        its.nodes.front().accesses.push_back({address, bytes, writes});
    });
}

// NOLINTNEXTLINE(readability-function-size): in C, arrays go with their lengths
std::size_t fake_add_node(cuda::CUgraph graph, double duration_ns, void (*run)(void*),
                          void* argument, const FakeAccess* accesses, std::size_t num_accesses,
                          const std::size_t* after, std::size_t num_after) {
    return tell("fake_add_node", [&](Model& model) {
        fake::Graph& its = model.graph(graph);
        its.add({duration_ns,
                 [=] { run(argument); },
                 {accesses, accesses + num_accesses},
                 {after, after + num_after}});
        return its.nodes.size() - 1;
    });
}

cuda::CUgraph fake_make_mix_graph(double duration_ns, std::uint64_t salt,
                                  const FakeAccess* accesses, std::size_t num_accesses) {
    return tell("fake_make_mix_graph", [&](Model& model) {
        const std::vector<FakeAccess> its(accesses, accesses + num_accesses);
        return make_captured(model, {duration_ns, [=] { run_mix(salt, its); }, its, {}});
    });
}

void fake_fail(const char* function, int nth, int error, int sticky) {
    tell("fake_fail", [&](Model& model) {
        fake::known_function(model, function);
        model.faults.plan(function, nth, error, sticky != 0);
    });
}

void fake_drop_wait(int nth) {
    tell("fake_drop_wait", [&](Model& model) { model.waits_to_drop = nth; });
}

void fake_hang(const char* function, int nth) {
    tell("fake_hang", [&](Model& model) {
        model.hangs_in = function;
        model.hangs_at = nth;
    });
}

void fake_hang_node(int nth) {
    tell("fake_hang_node", [&](Model& model) { model.node_to_hang = nth; });
}

void fake_let_go(int runs) {
    tell("fake_let_go", [&](Model& model) {
        for (const auto& stream : model.schedule.streams()) {
            for (fake::Work& work : stream->queue) work.hangs = false;
        }
        if (runs == 0) model.drop_work();
    });
}

void fake_set_capturing(int capturing) {
    tell("fake_set_capturing", [&](Model& model) { model.capturing = capturing != 0; });
}

void fake_set_capturing_alone(int capturing) {
    tell("fake_set_capturing_alone", [&](Model& model) {
        model.captures_alone.reset();
        if (capturing != 0) model.captures_alone = std::this_thread::get_id();
    });
}

int fake_unsafe(const char* function) {
    return tell(function, [](Model& model) {
        model.require_safe_beside_captures();
        return 1;
    });
}

void fake_set_queue(std::size_t most) {
    tell("fake_set_queue", [&](Model& model) {
        if (most == 0) model.refuse("a queue has room", cuda::kInvalidValue);
        model.most_queued = most;
    });
}

void fake_reuse_handles() {
    tell("fake_reuse_handles", [&](Model& model) {
        model.streams.reuse();
        model.events.reuse();
        model.graphs.reuse();
        model.execs.reuse();
    });
}

unsigned fake_first_multiprocessor(cuda::CUstream stream) {
    return tell("fake_first_multiprocessor",
                [&](Model& model) { return model.group_of(model.stream(stream)).first; });
}

unsigned fake_num_multiprocessors(cuda::CUstream stream) {
    return tell("fake_num_multiprocessors",
                [&](Model& model) { return model.group_of(model.stream(stream)).count; });
}

void fake_forgive() {
    tell("fake_forgive", [](Model& model) { model.violations.forgive(); });
}

const char* fake_leaks() {
    static std::string text;
    return tell("fake_leaks", [&](Model& model) {
        text = leaks(model);
        return text.c_str();
    });
}

std::uint64_t fake_staged_copies() {
    return tell("fake_staged_copies", [](Model& model) { return model.staged_copies; });
}

std::uint64_t fake_pageable_copies() {
    return tell("fake_pageable_copies", [](Model& model) { return model.pageable_copies; });
}

std::uint64_t fake_full_queues() {
    return tell("fake_full_queues", [](Model& model) { return model.full_queues; });
}
