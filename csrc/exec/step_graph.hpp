// Step graph: a whole step of a job as one CUDA graph, which one call launches.
#pragma once

#include <cstdint>
#include <map>

#include "exec/stream_job.hpp"

namespace pykern {

// Made of the launches of all actions, their graphs as children and their transfers, and of those
// of the copies, each a node; the edges are those of the program: after the task before in the
// stream, and after those that are waited for. Kernels keep the multiprocessors of the stream that
// they were captured on. Nothing in it can be timed or run by the client, and what of it runs side
// by side, the driver decides.
//
// The job must outlive it, and so must what the actions' graphs were captured with.
class StepGraph {
   public:
    // Throws std::invalid_argument where an action has no launch.
    explicit StepGraph(const StreamJob& job);
    StepGraph(const StepGraph&) = delete;
    StepGraph& operator=(const StepGraph&) = delete;
    // Waits for the last step, since a graph must not end while it runs.
    ~StepGraph();

    // Whether the job's launches and transfers are those that it was made of.
    bool is_current() const { return version_ == job_.version(); }

    // One step. It begins after what the callers' streams, one for each GPU, hold so far, and these
    // go on after its end. Returns when it is launched; where that throws CudaError, when nothing
    // of it runs any more.
    void run(const std::map<int, cuda::CUstream>& callers) const;

   private:
    void launch(const std::map<int, cuda::CUstream>& callers) const;
    // Errors of the driver are ignored: the caller is ending something else.
    void drain() const noexcept;

    const StreamJob& job_;
    std::uint64_t version_;
    cuda::GraphExec exec_;
};

}  // namespace pykern
