#include "exec/streams.hpp"

#include <algorithm>
#include <utility>

#include "exec/ranges.hpp"
#include "exec/step_marks.hpp"
#include "exec/stream_trace.hpp"
#include "exec/stream_watch.hpp"

namespace pykern {

namespace {

namespace driver = cuda::driver;

void move_on(cuda::CUstream stream, const Transfers& transfers) {
    for (const Transfer& transfer : transfers) {
        driver::cuMemcpyAsync(transfer.to, transfer.from, transfer.bytes, stream);
    }
}

// Makes a context current, unless it is.
void enter(cuda::CUcontext context, cuda::CUcontext& current) {
    if (context == current) return;
    driver::cuCtxSetCurrent(context);
    current = context;
}

void wait(cuda::CUstream stream, cuda::CUevent event) {
    driver::cuStreamWaitEvent(stream, event, 0);
}

void move(const Transfers& transfers, const CopyLane& lane) {
    const cuda::CUstream stream = lane.stream.get();
    if (!lane.by_host) {
        move_on(stream, transfers);
        return;
    }
    const cuda::CUstream landing = lane.by_host->landing.get();
    // A wait is for the last record before it, so the parts can share an event.
    in_parts(transfers, [&](const Transfer& part) {
        driver::cuMemcpyAsync(part.via, part.from, part.bytes, stream);
        driver::cuEventRecord(lane.by_host->half.get(), stream);
        wait(landing, lane.by_host->half.get());
        driver::cuMemcpyAsync(part.to, part.via, part.bytes, landing);
    });
    driver::cuEventRecord(lane.by_host->landed.get(), landing);
    wait(stream, lane.by_host->landed.get());
}

}  // namespace

Dispatch::Dispatch(StreamJob& job, const std::map<int, cuda::CUstream>& callers,
                   StreamClient& client, bool replay, StreamTrace* trace, StreamWatch* watch)
    : job_(job),
      order_(job.order()),
      callers_(callers),
      client_(client),
      replay_(replay),
      trace_(trace),
      watch_(watch),
      given_(job.order().tasks().size()) {}

bool Dispatch::run() {
    const Range step = Range::of_step();
    return run([this] {
        cuda::CUcontext current = nullptr;
        return std::ranges::all_of(job_.issued(), [&](TaskNumber number) {
            const Task& task = order_.tasks()[number];
            const Range range(task.action, order_.device_of_stream(task.stream));
            return issue(number, current);
        });
    });
}

bool Dispatch::run(const std::function<bool()>& issue_all) {
    const cuda::CurrentContext restore(job_.lanes().primary(0));
    if (watch_ != nullptr) {
        marks_ = job_.take_marks();
        watch_->add(marks_);
    }
    try {
        begin();
        if (!issue_all()) {
            drain();
            return false;
        }
        end();
        if (marks_) marks_->finish();
        return true;
    } catch (...) {
        drain();
        throw;
    }
}

// Every stream waits for what its GPU's caller has issued so far. A copy stream waits for its two
// lanes, which are then through with the step before, whoever called that: it fills slots of the
// receiver.
void Dispatch::begin() {
    const Lanes& lanes = job_.lanes();
    job_.record_start(callers_);
    for (int lane = 0; lane < lanes.size(); ++lane) {
        wait(lanes.compute(lane), job_.start(lanes.gpu_of(lane)));
        driver::cuEventRecord(job_.lane_start(lane), lanes.compute(lane));
        if (marks_) marks_->begin(lane);
    }
    for (std::size_t i = 0; i < job_.copy_lanes().size(); ++i) {
        const CopyStream& ends = order_.copy_streams()[i];
        const cuda::CUstream stream = job_.copy_lanes()[i].stream.get();
        wait(stream, job_.lane_start(ends.sender));
        wait(stream, job_.lane_start(ends.receiver));
    }
}

bool Dispatch::issue(TaskNumber number, cuda::CUcontext& current) {
    const Task& task = order_.tasks()[number];
    const cuda::CUstream stream = job_.stream(task.stream);
    enter(job_.lanes().primary(order_.device_of_stream(task.stream)), current);
    for (const TaskNumber input : order_.waits(number)) wait(stream, job_.done(input));
    if (trace_ != nullptr) trace_->start(number);
    if (order_.is_compute(task)) {
        if (!act(number, current)) return false;
    } else {
        const auto& given = given_[number];
        move(given ? *given : job_.transfers(number), job_.copy_lane(task));
    }
    if (trace_ != nullptr) trace_->end(number);
    if (task.awaited) driver::cuEventRecord(job_.done(number), stream);
    if (marks_) mark(number);
    return true;
}

void Dispatch::mark(TaskNumber number) {
    const auto& launch = job_.launch(number);
    const bool is_graph = replay_ && launch.has_value();
    const auto& given = given_[number];
    std::size_t bytes = 0;
    for (const Transfer& each : given ? *given : job_.transfers(number)) bytes += each.bytes;
    if (is_graph) {
        for (const Transfer& each : launch->after) bytes += each.bytes;
    }
    marks_->record(number, {.bytes = bytes, .is_graph = is_graph});
    watch_->require_progress();
}

bool Dispatch::act(TaskNumber number, cuda::CUcontext& current) {
    const Task& task = order_.tasks()[number];
    if (const auto& launch = job_.launch(number); launch && replay_) {
        const cuda::CUstream stream = job_.stream(task.stream);
        move_on(stream, launch->before);
        if (launch->exec != nullptr) driver::cuGraphLaunch(launch->exec, stream);
        move_on(stream, launch->after);
        return true;
    }
    Transfers transfers;
    if (!client_.run(number, transfers)) return false;
    // The client may have made another context current. Most leave it, and on an H100 it took 0.6
    // us to set one, whichever was current.
    driver::cuCtxGetCurrent(&current);
    enter(job_.lanes().primary(task.stream), current);
    const TaskNumber carrier = job_.carrier_of(number);
    if (carrier != StreamJob::kNoTask) given_[carrier] = std::move(transfers);
    return true;
}

// A lane waits for the copies that leave it, whose sources its GPU's memory is reused after; those
// that arrive, an action of it has waited for.
void Dispatch::end() {
    const Lanes& lanes = job_.lanes();
    for (std::size_t i = 0; i < job_.copy_lanes().size(); ++i) {
        const CopyLane& copies = job_.copy_lanes()[i];
        driver::cuEventRecord(copies.end.get(), copies.stream.get());
        wait(lanes.compute(order_.copy_streams()[i].sender), copies.end.get());
    }
    for (int lane = 0; lane < lanes.size(); ++lane) {
        driver::cuEventRecord(job_.lane_end(lane), lanes.compute(lane));
    }
    cuda::CUcontext current = nullptr;
    for (int lane = 0; lane < lanes.size(); ++lane) {
        enter(lanes.primary(lane), current);
        wait(callers_.at(lanes.gpu_of(lane)), job_.lane_end(lane));
    }
}

// Errors of the driver are ignored, because there is a failure to report already.
void Dispatch::drain() noexcept {
    if (marks_) {
        watch_->drain(*marks_, [this] { end(); });
        return;
    }
    const auto finish = [](cuda::CUstream stream) noexcept {
        cuda::api().cuStreamSynchronize(stream);
    };
    for (int stream = 0; stream < order_.num_streams(); ++stream) finish(job_.stream(stream));
    for (const CopyLane& copies : job_.copy_lanes()) {
        if (copies.by_host) finish(copies.by_host->landing.get());
    }
}

}  // namespace pykern
