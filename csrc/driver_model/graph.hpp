// Graphs: nodes in an order that their edges allow, and what launching them does.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "driver_model/fake.hpp"
#include "driver_model/memory.hpp"
#include "driver_model/schedule.hpp"
#include "driver_model/violations.hpp"

namespace pykern::fake {

struct Node {
    double duration_ns = 0;
    std::function<void()> run;
    std::vector<FakeAccess> accesses;
    std::vector<std::size_t> after;  // earlier nodes
    // A node that has one records it, and does nothing else.
    cuda::CUevent event = nullptr;
};

struct Graph {
    std::vector<Node> nodes;
    // A child is one node by its handle, and many here: those of them that come last.
    std::unordered_map<cuda::CUgraphNode, std::vector<std::size_t>> ends;
    bool captured = false;  // made by a test, in the place of torch

    cuda::CUgraphNode add(Node node);
    cuda::CUgraphNode add_child(const Graph& child, const std::vector<std::size_t>& after);
};

struct Exec {
    std::shared_ptr<const std::vector<Node>> nodes;
    double duration_ns = 0;
    std::vector<FakeAccess> accesses;
    std::optional<Site> last_launch;
    std::unordered_map<cuda::CUgraphNode, std::size_t> records;  // nodes that record an event
    std::map<std::size_t, cuda::CUevent> events;                 // by node
};

// One launch. The nodes that hang, and all behind them, run apart from the others.
struct Launched {
    std::shared_ptr<const std::vector<Node>> nodes;
    std::map<std::size_t, std::shared_ptr<Mark>> marks;  // by node
    std::vector<bool> late;                              // by node
};

// Tells of nodes that touch the same bytes and are not ordered by edges.
Exec instantiate(const Graph& graph, Violations& violations);
// Which nodes are the nth that does work (from 1), or behind it.
std::vector<bool> late_from(const std::vector<Node>& nodes, int nth);
// Its nodes that are late, or the others, in a random order that the edges allow.
void run(const Launched& launched, bool late, Random& random);

}  // namespace pykern::fake
