// Streams: the CUDA driver. One thread issues the tasks of a program to the streams of its lanes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "exec/stream_job.hpp"

namespace pykern {

class StepMarks;
class StreamTrace;
class StreamWatch;

// Runs the actions that are not launched.
class StreamClient {
   public:
    StreamClient() = default;
    StreamClient(const StreamClient&) = delete;
    StreamClient& operator=(const StreamClient&) = delete;
    virtual ~StreamClient() = default;

    // Issues the action's work to the compute stream of its lane and says what its copy, if it has
    // one, has to move. False fails the step: nothing further is issued.
    virtual bool run(TaskNumber task, Transfers& transfers) noexcept = 0;
};

// One step of a job, on the calling thread. It begins after what the callers' streams, one for each
// GPU, hold so far, and these go on after its end. `run` returns when everything is issued, not
// done; but where it fails, or throws CudaError, when all that was issued is done. With a watch it
// throws StreamsStalled, or fails, where a step has stalled, and then waits for nothing.
class Dispatch {
   public:
    // Without `replay` the client runs actions that have a launch as well. `trace` and `watch` may
    // be null.
    Dispatch(StreamJob& job, const std::map<int, cuda::CUstream>& callers, StreamClient& client,
             bool replay, StreamTrace* trace, StreamWatch* watch);

    // False where the client has failed.
    bool run();

   private:
    void begin();
    bool issue(TaskNumber number);
    bool perform(TaskNumber number);
    bool act(TaskNumber number);
    void end();
    void mark(TaskNumber number);
    void drain() noexcept;
    void drain_watched() noexcept;
    // Makes a context current, unless this job has done so last.
    void enter(cuda::CUcontext context);

    StreamJob& job_;
    const StreamOrder& order_;
    const std::map<int, cuda::CUstream>& callers_;
    StreamClient& client_;
    bool replay_;
    StreamTrace* trace_;
    StreamWatch* watch_;
    std::shared_ptr<StepMarks> marks_;  // with a watch
    // The context that is current; null where something else may have made another one current.
    cuda::CUcontext current_ = nullptr;
    // By copy: what an action that the client ran has given it.
    std::vector<std::optional<Transfers>> given_;
};

}  // namespace pykern
