#include "exec/stall_report.hpp"

#include <optional>
#include <vector>

#include "exec/stream_job.hpp"
#include "exec/watchdog.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

class StallReport {
   public:
    StallReport(const StepMarks& step, std::int64_t now)
        : step_(step), order_(step.order()), now_(now) {}

    std::string first_line() const {
        return longest() + " has not ended for " + seconds(step_.longest_ns(now_)) +
               "; the pipeline is closed";
    }

    std::string of_begin() const {
        std::string lanes;
        for (int lane = 0; lane < order_.num_devices(); ++lane) {
            if (step_.has_begun(lane)) continue;
            lanes += (lanes.empty() ? "" : ", ") + std::to_string(lane) + " (GPU " +
                     std::to_string(step_.lanes().gpu_of(lane)) + ")";
        }
        return "\nthe step waits for " + seconds(step_.begin_ns(now_)) +
               " for work that torch's current stream held before the step, on device " + lanes;
    }

    std::string of_stream(int stream) const {
        const std::optional<TaskNumber> task = step_.current(stream);
        if (!task) return {};
        const std::string name = "\n" + name_of(stream);
        const std::vector<TaskNumber> lacking = step_.lacking(stream);
        if (step_.is_at_work(stream)) {
            return name + " is in " + text(*task) + " for " + seconds(step_.ns(stream, now_)) +
                   ": " + what(*task) + " issued, and the event behind has not come" + last(stream);
        }
        if (lacking.empty()) return {};
        std::string events;
        for (const TaskNumber input : lacking) {
            events += (events.empty() ? "" : ", and ") + ("the event behind " + text(input)) +
                      " on " + name_of(stream_of(input));
        }
        return name + " waits for " + events + ", to go on with " + text(*task) + last(stream);
    }

    std::string of_host() const {
        const std::optional<TaskNumber> task = step_.host_task();
        if (step_.is_cut()) return "\nthe issuing thread has ended the step, which failed";
        if (!task) {
            return std::string("\nthe issuing thread has issued all of the step") +
                   (step_.is_one_graph() ? ", as one CUDA graph" : "");
        }
        return "\nthe issuing thread is in " + place(*task) + " for " +
               seconds(step_.host_ns(now_)) + ", which it has not issued";
    }

   private:
    // The name of whatever has been at work for the longest time.
    std::string longest() const {
        const std::int64_t ns = step_.longest_ns(now_);
        if (step_.is_at_begin() && step_.begin_ns(now_) == ns) return "work before the step";
        if (step_.is_at_tail()) return "what a failed action has issued";
        for (int stream = 0; stream < order_.num_streams(); ++stream) {
            if (!step_.is_at_work(stream) || step_.ns(stream, now_) != ns) continue;
            if (const std::optional<TaskNumber> task = step_.current(stream)) return place(*task);
        }
        const std::optional<TaskNumber> task = step_.host_task();
        return task ? place(*task) : "the end of the step";
    }

    int stream_of(TaskNumber task) const { return order_.tasks()[task].stream; }
    std::string text(TaskNumber task) const { return to_text(order_.tasks()[task].action); }

    std::string place(TaskNumber task) const {
        const Action action = order_.tasks()[task].action;
        return "stage " + std::to_string(action.stage) + ", microbatch " +
               std::to_string(action.microbatch) + ", action " + to_text(action) + ", device " +
               std::to_string(order_.device_of_stream(stream_of(task)));
    }

    // As profilers have it.
    std::string name_of(int stream) const {
        if (stream < order_.num_devices()) {
            return "stream \"pykern dev" + std::to_string(stream) + " compute\"";
        }
        return "stream \"" +
               name_of_copies(
                   order_.copy_streams()[static_cast<std::size_t>(stream - order_.num_devices())]) +
               "\"";
    }

    std::string what(TaskNumber task) const {
        const StepMarks::Issued& issued = step_.issued(task);
        const std::string bytes = std::to_string(issued.bytes) + " bytes";
        if (!order_.is_compute(order_.tasks()[task])) return "a copy of " + bytes + " was";
        if (!issued.is_graph) return "kernels of Python code were";
        return issued.bytes == 0 ? "a CUDA graph was"
                                 : "a CUDA graph and copies of " + bytes + " were";
    }

    std::string last(int stream) const {
        const std::optional<TaskNumber> task = step_.last_issued(stream);
        return task ? "; issued last: " + text(*task) : "; nothing is issued";
    }

    const StepMarks& step_;
    const StreamOrder& order_;
    std::int64_t now_;
};

}  // namespace

std::string tell_stall(const StepMarks& step, std::size_t num_behind, std::int64_t now) {
    const StallReport report(step, now);
    std::string text = report.first_line();
    if (step.is_at_begin()) text += report.of_begin();
    for (const bool at_work : {true, false}) {
        for (int stream = 0; stream < step.order().num_streams(); ++stream) {
            if (step.is_at_work(stream) == at_work) text += report.of_stream(stream);
        }
    }
    text += report.of_host();
    if (num_behind > 0) text += ", and " + std::to_string(num_behind) + " behind it";
    return text;
}

}  // namespace pykern
