// Graphs: nodes in an order that their edges allow, and what launching them does.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "fake.hpp"
#include "memory.hpp"
#include "schedule.hpp"
#include "violations.hpp"

namespace pykern::fake {

struct Node {
    double duration_ns = 0;
    std::function<void()> run;
    std::vector<FakeAccess> accesses;
    std::vector<std::size_t> after;  // earlier nodes
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
};

// Tells of nodes that touch the same bytes and are not ordered by edges.
Exec instantiate(const Graph& graph, Violations& violations);
// In a random order that the edges allow.
void run(const std::vector<Node>& nodes, Random& random);

}  // namespace pykern::fake
