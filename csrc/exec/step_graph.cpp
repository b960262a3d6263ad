#include "exec/step_graph.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "exec/ranges.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

namespace driver = cuda::driver;

using Nodes = std::vector<cuda::CUgraphNode>;

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
        const cuda::Memcpy3D copy = flat_copy(to, from, bytes);
        cuda::CUgraphNode node = nullptr;
        driver::cuGraphAddMemcpyNode(&node, graph_, after_.data(), after_.size(), &copy, context);
        after_ = {node};
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

void add_tasks(cuda::CUgraph graph, const StreamJob& job) {
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
    }
}

// Instantiated under the first lane's context, which it is launched under.
cuda::GraphExec make_exec(const StreamJob& job) {
    const cuda::CUcontext context = job.lanes().primary(0);
    const cuda::CurrentContext current(context);
    cuda::CUgraph made = nullptr;
    driver::cuGraphCreate(&made, 0);
    const cuda::Graph graph(made, {context});
    add_tasks(graph.get(), job);
    cuda::CUgraphExec instantiated = nullptr;
    driver::cuGraphInstantiateWithFlags(&instantiated, graph.get(), 0);
    cuda::GraphExec exec(instantiated, {context});
    driver::cuGraphUpload(exec.get(), job.lanes().compute(0));
    return exec;
}

}  // namespace

StepGraph::StepGraph(const StreamJob& job)
    : job_(job), version_(job.version()), exec_(make_exec(job)) {}

StepGraph::~StepGraph() {
    if (exec_.get_deleter().process != getpid()) return;
    if (job_.lanes().is_closed()) return;
    try {
        // Whichever thread this is, another context or none may be current.
        const cuda::CurrentContext current(job_.lanes().primary(0));
        drain();
    } catch (const std::exception&) {
        return;
    }
}

void StepGraph::run(const std::map<int, cuda::CUstream>& callers) const {
    const Range range = Range::of_step();
    const cuda::CurrentContext restore(job_.lanes().primary(0));
    try {
        launch(callers);
    } catch (...) {
        drain();
        throw;
    }
}

void StepGraph::launch(const std::map<int, cuda::CUstream>& callers) const {
    const Lanes& lanes = job_.lanes();
    const cuda::CUstream stream = lanes.compute(0);
    job_.record_start(callers);
    driver::cuCtxSetCurrent(lanes.primary(0));
    for (const auto& [gpu, primary] : lanes.primaries()) {
        driver::cuStreamWaitEvent(stream, job_.start(gpu), 0);
    }
    driver::cuGraphLaunch(exec_.get(), stream);
    driver::cuEventRecord(job_.lane_end(0), stream);
    for (const auto& [gpu, primary] : lanes.primaries()) {
        driver::cuCtxSetCurrent(primary.get());
        driver::cuStreamWaitEvent(callers.at(gpu), job_.lane_end(0), 0);
    }
}

void StepGraph::drain() const noexcept { cuda::api().cuStreamSynchronize(job_.lanes().compute(0)); }

}  // namespace pykern
