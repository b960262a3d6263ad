#include "exec/stream_trace.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "exec/trace.hpp"

namespace pykern {

namespace {

namespace driver = cuda::driver;

constexpr double kNsPerMs = 1e6;

}  // namespace

StreamTrace::StreamTrace(const StreamJob& job) : job_(job) {
    const StreamOrder& order = job.order();
    const auto make_event = [&](int stream) {
        return cuda::make_event(job.context_of(stream), cuda::kEventTimed);
    };
    for (int stream = 0; stream < order.num_streams(); ++stream) {
        const cuda::CUcontext context = job.context_of(stream);
        if (bases_.contains(context)) continue;
        bases_.emplace(context, Base{.event = make_event(stream), .stream = job.stream(stream)});
    }
    start_.resize(order.tasks().size());
    end_.resize(order.tasks().size());
    for (const TaskNumber task : job.issued()) {
        const int stream = order.tasks()[task].stream;
        start_[task] = make_event(stream);
        end_[task] = make_event(stream);
    }
}

void StreamTrace::begin() {
    const cuda::CurrentContext current(job_.lanes().primary(0));
    for (int stream = 0; stream < job_.order().num_streams(); ++stream) {
        driver::cuStreamSynchronize(job_.stream(stream));
    }
    for (auto& [context, base] : bases_) {
        driver::cuEventRecord(base.event.get(), base.stream);
        base.host_ns = now_ns();
    }
}

void StreamTrace::record(cuda::CUevent event, TaskNumber task) const {
    driver::cuEventRecord(event, job_.stream(job_.order().tasks()[task].stream));
}

double StreamTrace::ns_of(cuda::CUevent event, int stream) const {
    driver::cuEventSynchronize(event);
    float milliseconds = 0;
    const Base& base = base_of(stream);
    driver::cuEventElapsedTime(&milliseconds, base.event.get(), event);
    return static_cast<double>(base.host_ns - base_of(0).host_ns) + milliseconds * kNsPerMs;
}

Timeline StreamTrace::actions() const { return rows(0, job_.order().num_devices()); }

Timeline StreamTrace::copies() const {
    const StreamOrder& order = job_.order();
    return rows(order.num_devices(), static_cast<int>(order.copy_streams().size()));
}

Timeline StreamTrace::rows(int first_stream, int num_streams) const {
    // Whichever thread asks, it may have none.
    const cuda::CurrentContext current(job_.lanes().primary(0));
    const std::vector<Task>& tasks = job_.order().tasks();
    std::vector<std::vector<Span>> rows(static_cast<std::size_t>(num_streams));
    // The step begins with the first action, for the rows of copies as well.
    double origin = std::numeric_limits<double>::max();
    for (const TaskNumber task : job_.issued()) {
        const int stream = tasks[task].stream;
        if (stream < job_.order().num_devices()) {
            origin = std::min(origin, ns_of(start_[task].get(), stream));
        }
        const int row = stream - first_stream;
        if (row < 0 || row >= num_streams) continue;
        rows[static_cast<std::size_t>(row)].push_back({tasks[task].action,
                                                       ns_of(start_[task].get(), stream),
                                                       ns_of(end_[task].get(), stream)});
    }
    for (std::vector<Span>& row : rows) {
        for (Span& span : row) {
            span.start_ns -= origin;
            span.end_ns -= origin;
        }
    }
    return Timeline(std::move(rows));
}

}  // namespace pykern
