#include "exec/stream_job.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "exec/ranges.hpp"
#include "exec/step_marks.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

bool is_forward(Action action) { return action.kind == Kind::F || action.kind == Kind::COPY_F; }

// The actions whose result a copy carries: its F, or its B or I.
std::vector<Action> sources_of(Action copy) {
    Action source = copy;
    if (copy.kind == Kind::COPY_F) {
        source.kind = Kind::F;
        return {source};
    }
    source.kind = Kind::B;
    Action other = source;
    other.kind = Kind::I;
    return {source, other};
}

void name_streams(const CopyStream& ends, const CopyLane& lane) {
    const std::string name = name_of_copies(ends);
    name_stream(lane.stream.get(), name.c_str());
    if (lane.by_host) name_stream(lane.by_host->landing.get(), (name + " landing").c_str());
}

}  // namespace

std::string name_of_copies(const CopyStream& ends) {
    return "pykern dev" + std::to_string(ends.sender) + " > dev" + std::to_string(ends.receiver) +
           (ends.kind == Kind::COPY_F ? " F" : " B");
}

StreamJob::StreamJob(const Plan& plan, std::shared_ptr<const Lanes> lanes, Half half)
    : order_(std::make_shared<const StreamOrder>(lower(plan))),
      lanes_(std::move(lanes)),
      half_(half) {
    if (order_->num_devices() != lanes_->size()) {
        throw std::invalid_argument("devices must be " + std::to_string(order_->num_devices()) +
                                    ", as in the plan, got " + std::to_string(lanes_->size()));
    }
    if (half_ != Half::kWhole) require_halves();
    const std::vector<Task>& tasks = order_->tasks();
    for (TaskNumber task = 0; task < tasks.size(); ++task) {
        const Action action = tasks[task].action;
        task_of_[action] = task;
        if (half_ == Half::kWhole || is_forward(action) == (half_ == Half::kForwards)) {
            issued_.push_back(task);
        }
    }
    carriers_.assign(tasks.size(), kNoTask);
    launches_.resize(tasks.size());
    transfers_.resize(tasks.size());
    for (TaskNumber copy = 0; copy < tasks.size(); ++copy) {
        if (order_->is_compute(tasks[copy])) continue;
        for (const Action source : sources_of(tasks[copy].action)) {
            if (const TaskNumber task = task_of(source); task != kNoTask) carriers_[task] = copy;
        }
    }
    make_events();
}

// A forward behind other actions may take over a slot, and would wait for the other half.
void StreamJob::require_halves() const {
    for (const Row& row : order_->plan().rows()) {
        const auto rest = std::ranges::find_if_not(row, is_forward);
        const auto late = std::find_if(rest, row.end(), is_forward);
        if (late == row.end()) continue;
        throw std::invalid_argument("a half of a plan must have its forwards first, got " +
                                    to_text(*late) + " behind " + to_text(*rest));
    }
}

void StreamJob::make_events() {
    for (const auto& [gpu, primary] : lanes_->primaries()) {
        start_.emplace(gpu, cuda::make_event(primary.get(), cuda::kEventDisableTiming));
    }
    for (int lane = 0; lane < lanes_->size(); ++lane) {
        const cuda::CUcontext context = lanes_->compute_context(lane);
        lane_start_.push_back(cuda::make_event(context, cuda::kEventDisableTiming));
        lane_end_.push_back(cuda::make_event(context, cuda::kEventDisableTiming));
    }
    for (const CopyStream& copy_stream : order_->copy_streams()) {
        const auto make_event = [this](int device) {
            return cuda::make_event(lanes_->primary(device), cuda::kEventDisableTiming);
        };
        const auto take_stream = [this](int device) {
            return cuda::take_stream(lanes_->gpu_of(device), cuda::StreamUse::kCopy);
        };
        const auto [sender, receiver, kind] = copy_stream;
        CopyLane lane{
            .stream = take_stream(sender), .end = make_event(sender), .by_host = std::nullopt};
        if (!lanes_->reaches(sender, receiver)) {
            lane.by_host.emplace(CopyLane::ByHost{.landing = take_stream(receiver),
                                                  .half = make_event(sender),
                                                  .landed = make_event(receiver)});
        }
        name_streams(copy_stream, lane);
        copy_lanes_.push_back(std::move(lane));
    }
    for (const Task& task : order_->tasks()) {
        done_.push_back(task.awaited
                            ? cuda::make_event(context_of(task.stream), cuda::kEventDisableTiming)
                            : cuda::Event());
    }
}

cuda::CUcontext StreamJob::context_of(int stream) const {
    return stream < order_->num_devices() ? lanes_->compute_context(stream)
                                          : lanes_->primary(order_->device_of_stream(stream));
}

cuda::CUstream StreamJob::stream(int number) const {
    const int num_lanes = order_->num_devices();
    if (number < num_lanes) return lanes_->compute(number);
    return copy_lanes_[static_cast<std::size_t>(number - num_lanes)].stream.get();
}

TaskNumber StreamJob::task_of(Action action) const {
    const auto found = task_of_.find(action);
    return found == task_of_.end() ? kNoTask : found->second;
}

void StreamJob::set_launch(TaskNumber task, Launch launch) {
    require(task, true);
    launches_[task] = std::move(launch);
    ++version_;
}

void StreamJob::set_transfers(TaskNumber copy, Transfers transfers) {
    require(copy, false);
    transfers_[copy] = std::move(transfers);
    ++version_;
}

std::shared_ptr<StepMarks> StreamJob::take_marks() {
    const auto found =
        std::ranges::find_if(marks_, [](const auto& marks) { return marks->take(); });
    if (found != marks_.end()) return *found;
    marks_.push_back(std::make_shared<StepMarks>(*this));
    marks_.back()->take();
    return marks_.back();
}

void StreamJob::record_start(const std::map<int, cuda::CUstream>& callers) const {
    for (const auto& [gpu, primary] : lanes_->primaries()) {
        // Current, because the caller's stream may be the default one, which every context has.
        cuda::driver::cuCtxSetCurrent(primary.get());
        cuda::driver::cuEventRecord(start(gpu), callers.at(gpu));
    }
}

void StreamJob::require(TaskNumber task, bool compute) const {
    if (task < order_->tasks().size() && order_->is_compute(order_->tasks()[task]) == compute) {
        return;
    }
    throw std::invalid_argument("task must be that of " +
                                std::string(compute ? "an action" : "a copy") +
                                " of the program, got " + std::to_string(task));
}

}  // namespace pykern
