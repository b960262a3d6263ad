// Streams: the CUDA driver. The calling thread, or a thread for each lane (issuing.hpp), issues the
// tasks of a program to the streams of its lanes.
#pragma once

#include <functional>
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

// One step of a job. It begins after what the callers' streams, one for each GPU, hold so far, and
// these go on after its end. `run` returns when everything is issued, not done; but where it fails,
// or throws CudaError, when all that was issued is done. With a watch it throws StreamsStalled, or
// fails, where a step has stalled, and then waits for nothing.
class Dispatch {
   public:
    // Without `replay` the client runs actions that have a launch as well. `trace` and `watch` may
    // be null.
    Dispatch(StreamJob& job, const std::map<int, cuda::CUstream>& callers, StreamClient& client,
             bool replay, StreamTrace* trace, StreamWatch* watch);

    // The calling thread issues all, in the order of the job. False where the client has failed.
    bool run();
    // The same with a function that issues all, by `issue`, and returns when that has ended.
    bool run(const std::function<bool()>& issue_all);
    // Issues one task, on any thread: behind all that its stream is ordered after, and not beside
    // another task of its stream. `current` is the context that is current on this thread; null
    // where that is not known. False where the client has failed.
    bool issue(TaskNumber number, cuda::CUcontext& current);

   private:
    void begin();
    bool act(TaskNumber number, cuda::CUcontext& current);
    void end();
    void mark(TaskNumber number);
    void drain() noexcept;

    StreamJob& job_;
    const StreamOrder& order_;
    const std::map<int, cuda::CUstream>& callers_;
    StreamClient& client_;
    bool replay_;
    StreamTrace* trace_;
    StreamWatch* watch_;
    std::shared_ptr<StepMarks> marks_;  // with a watch
    // By copy: what an action that the client ran has given it, before the copy was issued.
    std::vector<std::optional<Transfers>> given_;
};

}  // namespace pykern
