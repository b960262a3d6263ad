// Stream trace: when the tasks of one step started and ended on their streams.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "exec/stream_job.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// Timed events cost time, so only steps that are to be looked at have them. Times of two streams
// cannot be compared by the driver where their contexts differ, so each context counts from an
// event of its own. The event was recorded when nothing was under way, at a time that the host's
// clock tells. So within a context times are the GPU's, and across contexts off by the microseconds
// between the host's call and the GPU's record.
class StreamTrace {
   public:
    explicit StreamTrace(const StreamJob& job);

    // Waits until the streams are empty and records where their times count from.
    void begin();
    void start(TaskNumber task) { record(start_[task].get(), task); }
    void end(TaskNumber task) { record(end_[task].get(), task); }

    // For a step that was issued as a whole; wait for its end. A row for each device.
    Timeline actions() const;
    // A row for each copy stream.
    Timeline copies() const;

   private:
    void record(cuda::CUevent event, TaskNumber task) const;
    double ns_of(cuda::CUevent event, int stream) const;
    Timeline rows(int first_stream, int num_streams) const;

    const StreamJob& job_;
    struct Base {
        cuda::Event event;
        cuda::CUstream stream;
        std::int64_t host_ns = 0;
    };
    const Base& base_of(int stream) const { return bases_.at(job_.context_of(stream)); }

    std::map<cuda::CUcontext, Base> bases_;
    std::vector<cuda::Event> start_;  // by task, of those that the job issues
    std::vector<cuda::Event> end_;
};

}  // namespace pykern
