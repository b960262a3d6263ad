// Stream program: a plan on lanes, in all the forms in which a step of it may be issued.
#pragma once

#include <array>
#include <memory>
#include <stdexcept>
#include <utility>

#include "exec/issuing.hpp"
#include "exec/step_graph.hpp"
#include "exec/stream_job.hpp"
#include "exec/stream_trace.hpp"
#include "plan/text.hpp"

namespace pykern {

// A job with the trace of its last traced step, and its whole step as a graph or for threads.
class StreamProgram {
   public:
    StreamProgram(const Plan& plan, std::shared_ptr<const Lanes> lanes, Half half = Half::kWhole)
        : job(plan, std::move(lanes), half) {
        const Plan& held = job.order().plan();
        for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
            held_[kind] = held.has(static_cast<Kind>(kind));
        }
    }

    TaskNumber task_of(Action action) const {
        const TaskNumber task = job.task_of(action);
        if (task != StreamJob::kNoTask) return task;
        throw std::invalid_argument("action must be one of the program, got " + to_text(action));
    }

    const StreamTrace& last_trace() const {
        if (!is_traced) {
            throw std::runtime_error("no step has been traced. Run one with tracing on");
        }
        return *trace;
    }

    const std::array<bool, kNumKinds>& held() const { return held_; }

    StreamJob job;
    std::unique_ptr<StreamTrace> trace;
    bool is_traced = false;
    std::unique_ptr<StepGraph> whole;
    std::unique_ptr<IssuingProgram> by_threads;

   private:
    std::array<bool, kNumKinds> held_{};
};

}  // namespace pykern
