#include "exec/step_graph.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "exec/ranges.hpp"
#include "exec/stream_watch.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

namespace driver = cuda::driver;

using Nodes = std::vector<cuda::CUgraphNode>;

// The most bytes of a node: it takes a row of the copy for a pitch, which is at most 2^31 - 1.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

cuda::Memcpy3D flat_copy(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes) {
    cuda::Memcpy3D copy{};
    copy.srcMemoryType = copy.dstMemoryType = cuda::kMemoryTypeUnified;
    copy.srcDevice = from;
    copy.dstDevice = to;
    copy.srcPitch = copy.dstPitch = copy.WidthInBytes = bytes;
    copy.srcHeight = copy.dstHeight = copy.Height = copy.Depth = 1;
    return copy;
}

// Adds nodes one after another, as a stream would run them.
class Chain {
   public:
    // The driver takes no node twice.
    Chain(cuda::CUgraph graph, Nodes after) : graph_(graph), after_(std::move(after)) {
        std::ranges::sort(after_, std::less<>());
        after_.erase(std::ranges::unique(after_).begin(), after_.end());
    }

    void add(cuda::CUgraph child) {
        cuda::CUgraphNode node = nullptr;
        driver::cuGraphAddChildGraphNode(&node, graph_, after_.data(), after_.size(), child);
        after_ = {node};
    }

    void add_copy(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes,
                  cuda::CUcontext context) {
        for (std::size_t at = 0; at < bytes; at += kMostBytes) {
            const cuda::Memcpy3D copy =
                flat_copy(to + at, from + at, std::min(kMostBytes, bytes - at));
            cuda::CUgraphNode node = nullptr;
            driver::cuGraphAddMemcpyNode(&node, graph_, after_.data(), after_.size(), &copy,
                                         context);
            after_ = {node};
        }
    }

    void add(const Transfers& transfers, cuda::CUcontext context) {
        for (const Transfer& transfer : transfers) {
            add_copy(transfer.to, transfer.from, transfer.bytes, context);
        }
    }

    // The nodes after the last one; where no node was added, those before the first.
    const Nodes& end() const { return after_; }

   private:
    cuda::CUgraph graph_;
    Nodes after_;
};

void add_action(Chain& chain, const StreamJob& job, TaskNumber number) {
    const Task& task = job.order().tasks()[number];
    const std::optional<Launch>& launch = job.launch(number);
    if (!launch) {
        throw std::invalid_argument(
            "all actions must have launches for a graph of a whole step, got none for " +
            to_text(task.action));
    }
    const cuda::CUcontext context = job.lanes().primary(task.stream);
    chain.add(launch->before, context);
    if (launch->graph != nullptr) chain.add(launch->graph);
    chain.add(launch->after, context);
}

void add_copy(cuda::CUgraph graph, Chain& chain, const StreamJob& job, TaskNumber number) {
    const Task& task = job.order().tasks()[number];
    const Transfers& transfers = job.transfers(number);
    const CopyStream& ends = job.order().copy_stream(task);
    const cuda::CUcontext sender = job.lanes().primary(ends.sender);
    if (!job.copy_lane(task).by_host) {
        chain.add(transfers, sender);
        return;
    }
    const cuda::CUcontext receiver = job.lanes().primary(ends.receiver);
    Nodes landed;
    in_parts(transfers, [&](const Transfer& part) {
        chain.add_copy(part.via, part.from, part.bytes, sender);
        landed.insert(landed.end(), chain.end().begin(), chain.end().end());
        Chain landing(graph, std::move(landed));
        landing.add_copy(part.to, part.via, part.bytes, receiver);
        landed = landing.end();
    });
    if (!landed.empty()) chain = Chain(graph, std::move(landed));
}

cuda::CUgraphNode add_mark(cuda::CUgraph graph, const Nodes& after, cuda::CUevent event,
                           cuda::CUcontext context) {
    const cuda::CurrentContext current(context);
    cuda::CUgraphNode node = nullptr;
    driver::cuGraphAddEventRecordNode(&node, graph, after.data(), after.size(), event);
    return node;
}

// Returns the nodes that record the events of the marks, by task.
Nodes add_tasks(cuda::CUgraph graph, const StreamJob& job, const StepMarks* marks) {
    Nodes mark_nodes;
    const StreamOrder& order = job.order();
    std::vector<Nodes> end_of_task(order.tasks().size());
    std::vector<Nodes> end_of_stream(static_cast<std::size_t>(order.num_streams()));
    for (TaskNumber number = 0; number < order.tasks().size(); ++number) {
        const Task& task = order.tasks()[number];
        Nodes& end = end_of_stream[static_cast<std::size_t>(task.stream)];
        Nodes after = end;
        for (const TaskNumber input : order.waits(number)) {
            after.insert(after.end(), end_of_task[input].begin(), end_of_task[input].end());
        }
        Chain chain(graph, std::move(after));
        if (order.is_compute(task)) {
            add_action(chain, job, number);
        } else {
            add_copy(graph, chain, job, number);
        }
        end = chain.end();
        if (task.awaited) end_of_task[number] = chain.end();
        if (marks == nullptr) continue;
        const cuda::CUcontext context = job.context_of(task.stream);
        mark_nodes.push_back(add_mark(graph, end, marks->done(number), context));
    }
    return mark_nodes;
}

std::vector<StepMarks::Issued> issued_by(const StreamJob& job) {
    std::vector<StepMarks::Issued> issued;
    for (TaskNumber number = 0; number < job.order().tasks().size(); ++number) {
        const std::optional<Launch>& launch = job.launch(number);
        std::size_t bytes = 0;
        for (const Transfer& each : job.transfers(number)) bytes += each.bytes;
        for (const Transfer& each : launch.value_or(Launch{}).after) bytes += each.bytes;
        issued.push_back({.bytes = bytes, .is_graph = launch.has_value()});
    }
    return issued;
}

// Under the first lane's context, which is current, and which it is launched under.
cuda::GraphExec make_exec(const StreamJob& job, const cuda::Graph& graph) {
    cuda::CUgraphExec instantiated = nullptr;
    driver::cuGraphInstantiateWithFlags(&instantiated, graph.get(), 0);
    cuda::GraphExec exec(instantiated, {job.lanes().primary(0)});
    driver::cuGraphUpload(exec.get(), job.lanes().compute(0));
    return exec;
}

}  // namespace

StepGraph::StepGraph(StreamJob& job, bool is_watched) : job_(job), version_(job.version()) {
    const cuda::CUcontext context = job.lanes().primary(0);
    const cuda::CurrentContext current(context);
    if (is_watched) {
        const std::shared_ptr<StepMarks> marks = job.take_marks();
        marks->release();
        recorded_ = marks.get();
        issued_ = issued_by(job);
    }
    cuda::CUgraph made = nullptr;
    driver::cuGraphCreate(&made, 0);
    graph_ = cuda::Graph(made, {context});
    mark_nodes_ = add_tasks(graph_.get(), job, recorded_);
    exec_ = make_exec(job, graph_);
    if (!is_watched) graph_.reset();
}

StepGraph::~StepGraph() {
    if (!exec_.get_deleter().origin.is_here()) return;
    if (job_.lanes().is_closed()) return;
    try {
        if (last_ != nullptr && !last_->settle()) {
            [[maybe_unused]] const cuda::CUgraphExec kept = exec_.release();
            return;
        }
        // Whichever thread this is, another context or none may be current.
        const cuda::CurrentContext current(job_.lanes().primary(0));
        drain();
    } catch (const std::exception&) {
        return;
    }
}

void StepGraph::run(const std::map<int, cuda::CUstream>& callers, StreamWatch* watch) {
    const Range range = Range::of_step();
    const cuda::CurrentContext restore(job_.lanes().primary(0));
    std::shared_ptr<StepMarks> marks;
    if (watch != nullptr) {
        watch->require_progress();
        marks = job_.take_marks();
        watch->add(marks);
    }
    try {
        launch(callers, marks.get());
    } catch (...) {
        if (marks) {
            watch->drain(*marks, [&] { end(callers); });
        } else {
            drain();
        }
        throw;
    }
}

void StepGraph::launch(const std::map<int, cuda::CUstream>& callers, StepMarks* marks) {
    const Lanes& lanes = job_.lanes();
    const cuda::CUstream stream = lanes.compute(0);
    if (marks != nullptr) record_to(*marks);
    job_.record_start(callers);
    driver::cuCtxSetCurrent(lanes.primary(0));
    // The other lanes' streams do nothing else: the marks tell whose caller is late.
    for (int lane = 0; marks != nullptr && lane < lanes.size(); ++lane) {
        driver::cuStreamWaitEvent(lanes.compute(lane), job_.start(lanes.gpu_of(lane)), 0);
        marks->begin(lane);
    }
    for (const auto& [gpu, primary] : lanes.primaries()) {
        driver::cuStreamWaitEvent(stream, job_.start(gpu), 0);
    }
    driver::cuGraphLaunch(exec_.get(), stream);
    if (marks != nullptr) {
        last_ = marks;
        marks->record_all(issued_);
    }
    end(callers);
    if (marks != nullptr) marks->finish();
}

// The driver records all events of a graph when it launches the graph, as it does those of a
// stream when it is asked to: until its node is reached, an event is not done.
void StepGraph::record_to(const StepMarks& marks) {
    if (recorded_ == &marks) return;
    recorded_ = nullptr;
    for (TaskNumber task = 0; task < mark_nodes_.size(); ++task) {
        driver::cuGraphExecEventRecordNodeSetEvent(exec_.get(), mark_nodes_[task],
                                                   marks.done(task));
    }
    recorded_ = &marks;
}

void StepGraph::end(const std::map<int, cuda::CUstream>& callers) const {
    const cuda::CUstream stream = job_.lanes().compute(0);
    driver::cuEventRecord(job_.lane_end(0), stream);
    for (const auto& [gpu, primary] : job_.lanes().primaries()) {
        driver::cuCtxSetCurrent(primary.get());
        driver::cuStreamWaitEvent(callers.at(gpu), job_.lane_end(0), 0);
    }
}

void StepGraph::drain() const noexcept { cuda::api().cuStreamSynchronize(job_.lanes().compute(0)); }

}  // namespace pykern
