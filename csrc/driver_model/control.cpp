// Calls by which tests tell and ask: see fake.hpp.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "driver_model/bytes.hpp"
#include "driver_model/entry.hpp"

namespace {

using namespace pykern;  // NOLINT(google-build-using-namespace)
using fake::Model;

// Never fails and counts as no call; a wrong argument is told as a violation.
template <class Body>
auto tell(const char* function, const Body& body) -> decltype(body(std::declval<Model&>())) {
    const std::scoped_lock lock(fake::world().mutex);
    Model& model = *fake::world().model;
    const fake::Entered entered(model, function);
    try {
        return body(model);
    } catch (const fake::Refused&) {
        return decltype(body(model))();
    }
}

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

cuda::CUgraph make_captured(Model& model, fake::Node node) {
    auto graph = std::make_shared<fake::Graph>();
    graph->captured = true;
    graph->add(std::move(node));
    return model.graphs.add(std::move(graph));
}

}  // namespace

void fake_reset(int num_devices, std::uint64_t seed) {
    const std::scoped_lock lock(fake::world().mutex);
    fake::world().model = std::make_unique<Model>(num_devices, seed);
    fake::world().driver_version = 13000;
}

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

void fake_set_peer(int device, int peer, int reachable) {
    tell("fake_set_peer", [&](Model& model) {
        model.device(device);
        model.device(peer);
        if (reachable != 0) {
            model.unreachable.erase({device, peer});
        } else {
            model.unreachable.emplace(device, peer);
        }
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
        model.schedule.complete(address, model.memory.bytes_at(address));
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

void fake_allow_undeclared(int allowed) {
    tell("fake_allow_undeclared",
         [&](Model& model) { model.memory.allow_undeclared(allowed != 0); });
}

void fake_kernel(cuda::CUstream stream, double duration_ns, const FakeAccess* accesses,
                 std::size_t num_accesses) {
    tell("fake_kernel", [&](Model& model) {
        fake::Work work;
        work.accesses.assign(accesses, accesses + num_accesses);
        model.issue(model.stream(stream), std::move(work), duration_ns);
        model.schedule.run_some();
    });
}

void fake_launch(cuda::CUstream stream, double duration_ns, const FakeAccess* accesses,
                 std::size_t num_accesses) {
    tell("fake_launch", [&](Model& model) {
        fake::Work work;
        work.accesses.assign(accesses, accesses + num_accesses);
        model.require_device_of(model.stream(stream));
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

void fake_run_all() {
    tell("fake_run_all", [](Model& model) { model.schedule.run_all(); });
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

void fake_begin_step() {
    tell("fake_begin_step", [](Model& model) { ++model.step; });
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
        model.schedule.let_go();
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

int fake_violations() {
    return tell("fake_violations", [](Model& model) {
        model.lent.check();
        return static_cast<int>(model.violations.texts().size());
    });
}

const char* fake_violation(int index) {
    static std::string text;
    return tell("fake_violation", [&](Model& model) {
        text = model.violations.texts().at(static_cast<std::size_t>(index));
        return text.c_str();
    });
}

const char* fake_leaks() {
    static std::string text;
    return tell("fake_leaks", [&](Model& model) {
        text = model.leaks();
        return text.c_str();
    });
}

std::uint64_t fake_calls(const char* function) {
    return tell("fake_calls", [&](Model& model) {
        fake::known_function(model, function);
        return model.faults.calls(function);
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
