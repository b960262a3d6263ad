#include "driver_model/graph.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "driver_model/handles.hpp"

namespace pykern::fake {
namespace {

bool conflict(const FakeAccess& one, const FakeAccess& other) {
    return (one.writes != 0 || other.writes != 0) && one.address < other.address + other.bytes &&
           other.address < one.address + one.bytes;
}

bool conflict(const Node& one, const Node& other) {
    return std::ranges::any_of(one.accesses, [&](const FakeAccess& mine) {
        return std::ranges::any_of(
            other.accesses, [&](const FakeAccess& theirs) { return conflict(mine, theirs); });
    });
}

void check_races(const std::vector<Node>& nodes, Violations& violations) {
    // before[i][j]: node j is ordered before node i.
    std::vector<std::vector<bool>> before(nodes.size(), std::vector<bool>(nodes.size()));
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        for (const std::size_t former : nodes[i].after) {
            before[i][former] = true;
            for (std::size_t j = 0; j < former; ++j)
                before[i][j] = before[i][j] || before[former][j];
        }
        for (std::size_t j = 0; j < i; ++j) {
            if (before[i][j] || !conflict(nodes[i], nodes[j])) continue;
            violations.add("race in a graph: its nodes " + std::to_string(j) + " and " +
                           std::to_string(i) + " touch the same bytes, and no edges order them");
        }
    }
}

double critical_path_ns(const std::vector<Node>& nodes) {
    std::vector<double> ends;
    double longest = 0;
    for (const Node& node : nodes) {
        double start = 0;
        for (const std::size_t former : node.after) start = std::max(start, ends[former]);
        ends.push_back(start + node.duration_ns);
        longest = std::max(longest, ends.back());
    }
    return longest;
}

}  // namespace

cuda::CUgraphNode Graph::add(Node node) {
    auto* const handle = static_cast<cuda::CUgraphNode>(unused_address());
    ends[handle] = {nodes.size()};
    nodes.push_back(std::move(node));
    return handle;
}

cuda::CUgraphNode Graph::add_child(const Graph& child, const std::vector<std::size_t>& after) {
    const std::size_t base = nodes.size();
    std::vector<bool> last(child.nodes.size(), true);
    for (Node node : child.nodes) {
        for (std::size_t& former : node.after) {
            last[former] = false;
            former += base;
        }
        if (node.after.empty()) node.after = after;
        nodes.push_back(std::move(node));
    }
    auto* const handle = static_cast<cuda::CUgraphNode>(unused_address());
    // Nodes behind an empty child follow the nodes before the child.
    if (child.nodes.empty()) ends[handle] = after;
    for (std::size_t i = 0; i < last.size(); ++i) {
        if (last[i]) ends[handle].push_back(base + i);
    }
    return handle;
}

Exec instantiate(const Graph& graph, Violations& violations) {
    check_races(graph.nodes, violations);
    Exec exec;
    exec.nodes = std::make_shared<const std::vector<Node>>(graph.nodes);
    exec.duration_ns = critical_path_ns(graph.nodes);
    for (const Node& node : graph.nodes) {
        exec.accesses.insert(exec.accesses.end(), node.accesses.begin(), node.accesses.end());
    }
    for (const auto& [handle, its] : graph.ends) {
        if (its.size() != 1 || graph.nodes[its.front()].event == nullptr) continue;
        exec.records[handle] = its.front();
        exec.events[its.front()] = graph.nodes[its.front()].event;
    }
    return exec;
}

std::vector<bool> late_from(const std::vector<Node>& nodes, int nth) {
    std::vector<bool> late(nodes.size());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        if (nodes[i].event == nullptr && --nth == 0) late[i] = true;
        for (const std::size_t former : nodes[i].after) late[i] = late[i] || late[former];
    }
    return late;
}

void run(const Launched& launched, bool late, Random& random) {
    const std::vector<Node>& nodes = *launched.nodes;
    std::vector<std::size_t> missing(nodes.size());
    std::vector<std::vector<std::size_t>> followers(nodes.size());
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        missing[i] = nodes[i].after.size();
        for (const std::size_t former : nodes[i].after) followers[former].push_back(i);
        if (missing[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) {
        std::uniform_int_distribution<std::size_t> any(0, ready.size() - 1);
        std::swap(ready[any(random)], ready.back());
        const std::size_t i = ready.back();
        ready.pop_back();
        if (launched.late[i] == late) {
            if (nodes[i].run) nodes[i].run();
            if (const auto found = launched.marks.find(i); found != launched.marks.end()) {
                found->second->done = true;
            }
        }
        for (const std::size_t follower : followers[i]) {
            if (--missing[follower] == 0) ready.push_back(follower);
        }
    }
}

}  // namespace pykern::fake
