// Step graph: a whole step of a job as one CUDA graph, which one call launches.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "exec/step_marks.hpp"
#include "exec/stream_job.hpp"

namespace pykern {

class StreamWatch;

// Made of the launches of all actions, their graphs as children and their transfers, and of those
// of the copies, each a node; the edges are those of the program: after the task before in the
// stream, and after those that are waited for. Kernels keep the multiprocessors of the stream that
// they were captured on. Nothing in it can be timed or run by the client, and what of it runs side
// by side, the driver decides. For a watch, a node behind each task records the event of its mark.
//
// The job must outlive it, and so must what the actions' graphs were captured with.
class StepGraph {
   public:
    // Throws std::invalid_argument where an action has no launch.
    StepGraph(StreamJob& job, bool is_watched);
    StepGraph(const StepGraph&) = delete;
    StepGraph& operator=(const StepGraph&) = delete;
    // Waits for the last step, since a graph must not end while it runs. Behind a step that has
    // stalled, the driver keeps the graph.
    ~StepGraph();

    // Whether the job's launches and transfers are those that it was made of.
    bool is_current() const { return version_ == job_.version(); }

    // One step. It begins after what the callers' streams, one for each GPU, hold so far, and these
    // go on after its end. Returns when it is launched; where that throws CudaError, when nothing
    // of it runs any more. The watch is null where the graph was made without one; with it, throws
    // StreamsStalled where a step has stalled, and then waits for nothing.
    void run(const std::map<int, cuda::CUstream>& callers, StreamWatch* watch);

   private:
    void launch(const std::map<int, cuda::CUstream>& callers, StepMarks* marks);
    // Has the next launch record the events of these marks.
    void record_to(const StepMarks& marks);
    void end(const std::map<int, cuda::CUstream>& callers) const;
    // Errors of the driver are ignored: the caller is ending something else.
    void drain() const noexcept;

    StreamJob& job_;
    std::uint64_t version_;
    // With a watch. All marks are the job's.
    cuda::Graph graph_;  // has the nodes that the executable graph knows by their handles
    std::vector<cuda::CUgraphNode> mark_nodes_;  // by task
    std::vector<StepMarks::Issued> issued_;      // by task
    const StepMarks* recorded_ = nullptr;        // whose events the nodes record
    StepMarks* last_ = nullptr;                  // of the last step
    cuda::GraphExec exec_;
};

}  // namespace pykern
