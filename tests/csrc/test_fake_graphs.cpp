#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "fake_pair.hpp"

using namespace pykern;
using namespace pykern::cuda;

namespace {

FakeAccess reads(const std::array<std::uint8_t, 64>& bytes) {
    return {std::bit_cast<CUdeviceptr>(bytes.data()), sizeof bytes, 0};
}

FakeAccess writes(const std::array<std::uint8_t, 64>& bytes) {
    return {std::bit_cast<CUdeviceptr>(bytes.data()), sizeof bytes, 1};
}

CUgraph mix(std::uint64_t salt, const std::vector<FakeAccess>& accesses) {
    return fake_make_mix_graph(1000, salt, accesses.data(), accesses.size());
}

CUgraphExec instantiate(const FakePair& pair, CUgraph graph) {
    CUgraphExec exec = nullptr;
    CHECK(pair.api.cuGraphInstantiateWithFlags(&exec, graph, 0) == kSuccess);
    return exec;
}

CUgraphNode add_copy(const FakePair& pair, CUgraph graph, const std::vector<CUgraphNode>& after) {
    Memcpy3D copy{};
    copy.srcMemoryType = copy.dstMemoryType = kMemoryTypeUnified;
    copy.srcDevice = std::bit_cast<CUdeviceptr>(pair.source.data());
    copy.dstDevice = std::bit_cast<CUdeviceptr>(pair.slot.data());
    copy.WidthInBytes = sizeof pair.slot;
    copy.Height = copy.Depth = 1;
    CUgraphNode node = nullptr;
    CHECK(pair.api.cuGraphAddMemcpyNode(&node, graph, after.data(), after.size(), &copy,
                                        pair.context[0]) == kSuccess);
    return node;
}

CUgraphNode add_child(const FakePair& pair, CUgraph graph, const std::vector<CUgraphNode>& after,
                      CUgraph child) {
    CUgraphNode node = nullptr;
    CHECK(pair.api.cuGraphAddChildGraphNode(&node, graph, after.data(), after.size(), child) ==
          kSuccess);
    return node;
}

}  // namespace

TEST_CASE("data shows in which order graphs ran, and a stream keeps it") {
    std::array<std::uint8_t, 64> first{};
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        FakePair pair(seed);
        CUgraphExec fill = instantiate(pair, mix(1, {writes(pair.slot)}));
        CUgraphExec turn = instantiate(pair, mix(2, {reads(pair.slot), writes(pair.slot)}));
        for (CUgraphExec exec : {fill, turn, turn}) {
            CHECK(pair.api.cuGraphLaunch(exec, pair.receiver) == kSuccess);
        }
        CHECK(pair.api.cuStreamSynchronize(pair.receiver) == kSuccess);
        CHECK(pair.violations().empty());
        if (seed == 0) first = pair.slot;
        CHECK(pair.slot == first);
        CHECK(pair.slot[0] != pair.slot[1]);
        CHECK(pair.api.cuGraphExecDestroy(fill) == kSuccess);
        CHECK(pair.api.cuGraphExecDestroy(turn) == kSuccess);
        CHECK(pair.violations().empty());
    }
}

TEST_CASE("a captured graph calls what the test gave it, when it runs") {
    FakePair pair(0);
    fake_set_eagerness(0);
    int calls = 0;
    CUgraph graph =
        fake_make_graph(1000, [](void* argument) { ++*static_cast<int*>(argument); }, &calls);
    fake_graph_access(graph, address_of(pair.slot), sizeof pair.slot, 1);
    CUgraphExec exec = instantiate(pair, graph);
    CHECK(pair.api.cuGraphUpload(exec, pair.receiver) == kSuccess);
    CHECK(pair.api.cuGraphLaunch(exec, pair.receiver) == kSuccess);
    CHECK(calls == 0);
    pair.touch_slot(pair.sender, false);
    CHECK(pair.violations_about("race") == 1);
    fake_run_all();
    CHECK(calls == 1);
}

TEST_CASE("an executable graph runs once at a time") {
    FakePair pair(1);
    CUgraphExec exec = instantiate(pair, mix(0, {}));
    CHECK(pair.api.cuGraphLaunch(exec, pair.sender) == kSuccess);
    SUBCASE("launches on one stream") {
        CHECK(pair.api.cuGraphLaunch(exec, pair.sender) == kSuccess);
        CHECK(pair.violations().empty());
    }
    SUBCASE("launches on two that events order") {
        CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == kSuccess);
        CHECK(pair.api.cuStreamWaitEvent(pair.receiver, pair.ready, 0) == kSuccess);
        CHECK(pair.api.cuGraphLaunch(exec, pair.receiver) == kSuccess);
        CHECK(pair.violations().empty());
    }
    SUBCASE("launches on two that nothing orders") {
        fake_run_all();
        CHECK(pair.api.cuGraphLaunch(exec, pair.receiver) == kSuccess);
        CHECK(pair.violations_about("launched while running") == 1);
    }
    SUBCASE("destroyed before the host waited") {
        CHECK(pair.api.cuGraphExecDestroy(exec) == kSuccess);
        CHECK(pair.violations_about("destroyed while running") == 1);
        CHECK(pair.api.cuGraphLaunch(exec, pair.sender) == 400);
    }
}

TEST_CASE("a graph of children and copies runs as its edges say") {
    std::array<std::uint8_t, 64> result{};
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        FakePair pair(seed);
        fake_alloc(address_of(result), sizeof result, pair.receiver);
        CUgraph produce = mix(1, {writes(pair.source)});
        CUgraph consume = mix(2, {reads(pair.slot), writes(result)});
        CUgraph step = nullptr;
        CHECK(pair.api.cuGraphCreate(&step, 0) == kSuccess);
        CUgraphNode produced = add_child(pair, step, {}, produce);
        CUgraphNode copied = add_copy(pair, step, {produced});
        add_child(pair, step, {copied}, consume);
        // A child was cloned when it was added.
        fake_graph_access(consume, address_of(pair.source), sizeof pair.source, 1);
        CUgraphExec exec = instantiate(pair, step);
        CHECK(pair.api.cuGraphLaunch(exec, pair.sender) == kSuccess);
        CHECK(pair.api.cuStreamSynchronize(pair.sender) == kSuccess);
        CHECK(pair.slot == pair.source);
        CHECK(result != pair.slot);
        CHECK(pair.violations().empty());
        CHECK(pair.api.cuGraphExecDestroy(exec) == kSuccess);
        CHECK(pair.api.cuGraphDestroy(step) == kSuccess);
        CHECK(pair.violations().empty());
    }
}

TEST_CASE("nodes that no edges order must not touch the same bytes") {
    FakePair pair(0);
    CUgraph consume = mix(2, {reads(pair.slot)});
    CUgraph step = nullptr;
    CHECK(pair.api.cuGraphCreate(&step, 0) == kSuccess);
    add_copy(pair, step, {});
    add_child(pair, step, {}, consume);
    instantiate(pair, step);
    CHECK(pair.violations_about("race in a graph: its nodes 0 and 1") == 1);
}

TEST_CASE("a node comes after another once") {
    FakePair pair(0);
    CUgraph step = nullptr;
    CHECK(pair.api.cuGraphCreate(&step, 0) == kSuccess);
    const CUgraphNode first = add_copy(pair, step, {});
    CUgraph consume = mix(2, {reads(pair.slot)});
    const std::array<CUgraphNode, 2> twice{first, first};
    CUgraphNode node = nullptr;
    CHECK(pair.api.cuGraphAddChildGraphNode(&node, step, twice.data(), 2, consume) ==
          kInvalidValue);
    CHECK(pair.violations_about("a node is named twice") == 1);
}

TEST_CASE("a graph takes as long as its longest path") {
    FakePair pair(0);
    fake_set_copy_cost(3e6, 1e9);
    CUgraph step = nullptr;
    CHECK(pair.api.cuGraphCreate(&step, 0) == kSuccess);
    CUgraphNode copied = add_copy(pair, step, {});
    const FakeAccess none{};
    CUgraph two_ms = fake_make_mix_graph(2e6, 0, &none, 0);
    add_child(pair, step, {copied}, two_ms);
    add_child(pair, step, {}, two_ms);
    const CUevent start = pair.make_event(pair.context[0], kEventTimed);
    const CUevent end = pair.make_event(pair.context[0], kEventTimed);
    CHECK(pair.api.cuEventRecord(start, pair.sender) == kSuccess);
    CHECK(pair.api.cuGraphLaunch(instantiate(pair, step), pair.sender) == kSuccess);
    CHECK(pair.api.cuEventRecord(end, pair.sender) == kSuccess);
    float milliseconds = 0;
    CHECK(pair.api.cuEventSynchronize(end) == kSuccess);
    CHECK(pair.api.cuEventElapsedTime(&milliseconds, start, end) == kSuccess);
    CHECK(milliseconds == doctest::Approx(5));
}
