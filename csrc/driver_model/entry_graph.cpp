// Graphs: built of children and copies, instantiated, launched.
#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver_model/entry.hpp"

namespace pykern::fake {
namespace {

// The nodes that come last of those that the handles stand for.
std::vector<std::size_t> ends_of(Model& model, const Graph& graph, const CUgraphNode* nodes,
                                 std::size_t num_nodes) {
    std::vector<std::size_t> ends;
    for (std::size_t i = 0; i < num_nodes; ++i) {
        const auto found = graph.ends.find(nodes[i]);
        if (found == graph.ends.end()) model.refuse("a node of another graph", kInvalidValue);
        if (std::find(nodes, nodes + i, nodes[i]) != nodes + i) {
            model.refuse("a node is named twice", kInvalidValue);
        }
        ends.insert(ends.end(), found->second.begin(), found->second.end());
    }
    return ends;
}

// CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far.
constexpr std::size_t kMostPitch = 2147483647;

void check_flat(Model& model, const Memcpy3D& copy) {
    const bool unified =
        copy.srcMemoryType == kMemoryTypeUnified && copy.dstMemoryType == kMemoryTypeUnified;
    const bool flat = copy.Height == 1 && copy.Depth == 1 && copy.srcXInBytes == 0 &&
                      copy.dstXInBytes == 0 && copy.srcY == 0 && copy.dstY == 0 && copy.srcZ == 0 &&
                      copy.dstZ == 0;
    if (!unified || !flat) {
        model.refuse("only flat copies between unified addresses are modelled", kInvalidValue);
    }
    if (std::max(copy.srcPitch, copy.dstPitch) > kMostPitch) {
        model.refuse("a pitch is larger than the device allows", kInvalidValue);
    }
}

void log_nodes(Log& log, const Graph& graph) {
    log.add("graph");
    for (const Node& node : graph.nodes) {
        std::string edges;
        for (const std::size_t former : node.after) edges += " " + std::to_string(former);
        log.add(node.accesses, "node", edges);
    }
}

// The host that sees such a mark knows no more than that the launch's stream has come to it.
Launched record_all(Model& model, Stream& stream, const Exec& exec) {
    Launched launched{exec.nodes, {}, late_from(*exec.nodes, model.node_to_hang)};
    model.node_to_hang = 0;
    for (const auto& [node, event] : exec.events) {
        launched.marks[node] = std::make_shared<Mark>();
        model.mark(stream, model.event(event), launched.marks[node]);
    }
    return launched;
}

void launch(Model& model, Stream& stream, CUgraphExec handle) {
    Exec& exec = model.exec(handle);
    const auto launched = std::make_shared<const Launched>(record_all(model, stream, exec));
    const auto part = [&](bool late) {
        Work work;
        work.run = [=, &random = model.schedule.random()] { run(*launched, late, random); };
        work.hangs = late;
        for (const auto& [node, mark] : launched->marks) work.marks_within.push_back(mark);
        return work;
    };
    Work work = part(false);
    work.accesses = exec.accesses;
    Site site = model.issue(stream, std::move(work), exec.duration_ns);
    model.log.add({{std::bit_cast<CUdeviceptr>(handle), 1, 1}}, "work", site.function,
                  stream.index);
    if (std::ranges::count(launched->late, true) > 0) site = model.issue(stream, part(true), 0);
    if (exec.last_launch && !stream.clock.covers(exec.last_launch->point)) {
        model.violations.add("the graph launched while running: nothing orders " + text_of(site) +
                             " after " + text_of(*exec.last_launch));
    }
    exec.last_launch = site;
}

}  // namespace

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
    return call("cuGraphCreate", Call::kPlain, [&](Model& model) {
        if (flags != 0) model.refuse("flags must be 0", kInvalidValue);
        *graph = model.graphs.add(std::make_shared<Graph>());
        return kSuccess;
    });
}

CUresult cuGraphDestroy(CUgraph graph) {
    return call("cuGraphDestroy", Call::kRelease, [&](Model& model) {
        model.graph(graph);
        model.graphs.remove(graph);
        return kSuccess;
    });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                  std::size_t num_after, CUgraph child) {
    return call("cuGraphAddChildGraphNode", Call::kPlain, [&](Model& model) {
        Graph& its = model.graph(graph);
        if (graph == child) model.refuse("a graph cannot be its own child", kInvalidValue);
        *node = its.add_child(model.graph(child), ends_of(model, its, after, num_after));
        return kSuccess;
    });
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                              std::size_t num_after, const Memcpy3D* copy, CUcontext context) {
    return call("cuGraphAddMemcpyNode", Call::kPlain, [&](Model& model) {
        Graph& its = model.graph(graph);
        model.context(context);
        check_flat(model, *copy);
        Work work = model.copy_work(copy->dstDevice, copy->srcDevice, copy->WidthInBytes);
        *node = its.add({model.copy_cost.duration_ns(copy->WidthInBytes), std::move(work.run),
                         std::move(work.accesses), ends_of(model, its, after, num_after)});
        return kSuccess;
    });
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                   std::size_t num_after, CUevent event) {
    return call("cuGraphAddEventRecordNode", Call::kPlain, [&](Model& model) {
        Graph& its = model.graph(graph);
        if (model.event(event).context != model.current_context()) {
            model.refuse("the event is of another context than the current one", kInvalidHandle);
        }
        *node = its.add({0, nullptr, {}, ends_of(model, its, after, num_after), event});
        return kSuccess;
    });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return call("cuGraphExecEventRecordNodeSetEvent", Call::kPlain, [&](Model& model) {
        Exec& its = model.exec(exec);
        const auto found = its.records.find(node);
        if (found == its.records.end()) {
            model.refuse("a node that is not of the graph, or records no event", kInvalidValue);
        }
        Event& before = model.event(its.events[found->second]);
        if (model.event(event).context != before.context) {
            model.refuse("the event is of another context than the one before", kInvalidHandle);
        }
        its.events[found->second] = event;
        return kSuccess;
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                     unsigned long long /*flags*/) {
    return call("cuGraphInstantiateWithFlags", Call::kPlain, [&](Model& model) {
        model.current_context();
        const Graph& its = model.graph(graph);
        log_nodes(model.log, its);
        *exec = model.execs.add(std::make_shared<Exec>(instantiate(its, model.violations)));
        return kSuccess;
    });
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
    return call("cuGraphUpload", Call::kWork, [&](Model& model) {
        model.current_context();
        model.exec(exec);
        model.issue(model.stream(stream), Work{}, 0);
        return kSuccess;
    });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    return call("cuGraphLaunch", Call::kWork, [&](Model& model) {
        model.current_context();
        launch(model, model.stream(stream), exec);
        return kSuccess;
    });
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    return call("cuGraphExecDestroy", Call::kRelease, [&](Model& model) {
        const auto& last = model.exec(exec).last_launch;
        if (last && !model.host.covers(last->point)) {
            model.violations.add("the graph destroyed while running: the host has not waited for " +
                                 text_of(*last));
        }
        model.execs.remove(exec);
        return kSuccess;
    });
}

}  // namespace pykern::fake
