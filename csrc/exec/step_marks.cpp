#include "exec/step_marks.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <span>
#include <thread>

#include "exec/stream_job.hpp"
#include "exec/trace.hpp"

namespace pykern {

namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

// Anything else, such as the error of a lost context, leaves nothing to wait for.
bool is_reached(const cuda::Event& event) {
    return cuda::api().cuEventQuery(event.get()) != cuda::kNotReady;
}

}  // namespace

StepMarks::StepMarks(const StreamJob& job)
    : order_(job.shared_order()),
      lanes_(job.shared_lanes()),
      tasks_(job.issued()),
      place_(job.order().tasks().size(), kNever),
      place_in_row_(job.order().tasks().size()),
      done_(job.order().tasks().size()),
      is_recorded_(job.order().tasks().size()),
      what_(job.order().tasks().size()),
      rows_(index(job.order().num_streams())),
      begun_(index(lanes_->size())),
      seen_(job.order().tasks().size()) {
    const auto make_event = [](cuda::CUcontext context) {
        return cuda::make_event(context, cuda::kEventDisableTiming);
    };
    for (std::size_t place = 0; place < tasks_.size(); ++place) {
        const TaskNumber task = tasks_[place];
        const int stream = order_->tasks()[task].stream;
        std::vector<TaskNumber>& row = rows_[index(stream)].tasks;
        place_[task] = place;
        place_in_row_[task] = row.size();
        row.push_back(task);
        done_[task] = make_event(job.context_of(stream));
    }
    for (int lane = 0; lane < lanes_->size(); ++lane) {
        begin_.push_back(make_event(lanes_->compute_context(lane)));
    }
    for (int stream = 0; stream < order_->num_streams(); ++stream) {
        streams_.push_back(job.stream(stream));
        tails_.push_back(make_event(job.context_of(stream)));
    }
    for (std::size_t i = 0; i < job.copy_lanes().size(); ++i) {
        const CopyLane& lane = job.copy_lanes()[i];
        if (!lane.by_host) continue;
        streams_.push_back(lane.by_host->landing.get());
        tails_.push_back(make_event(lanes_->primary(order_->copy_streams()[i].receiver)));
    }
}

bool StepMarks::take() {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    num_begun_ = 0;
    // Relaxed: whoever looks takes the marks from the watch, whose lock publishes these.
    for (auto& each : is_recorded_) each.store(false, std::memory_order_relaxed);
    is_whole_ = is_cut_ = is_one_graph_ = seen_whole_ = false;
    seen_.assign(seen_.size(), false);
    num_issued_ = 0;
    host_since_ns_ = begin_since_ns_ = tail_since_ns_ = 0;
    for (Row& row : rows_) {
        row.at = 0;
        row.since_ns = 0;
    }
    begun_.assign(begun_.size(), false);
    return true;
}

bool StepMarks::settle() {
    while (taken_.load(std::memory_order_acquire) && !given_up_.load(std::memory_order_acquire)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!given_up_.load(std::memory_order_relaxed)) return true;
    const cuda::CurrentContext current(lanes_->primary(0));
    return look(now_ns(), true);
}

void StepMarks::begin(int lane) {
    cuda::driver::cuEventRecord(begin_[index(lane)].get(), lanes_->compute(lane));
    num_begun_.store(lane + 1, std::memory_order_release);
}

void StepMarks::record(TaskNumber task, Issued issued) {
    what_[task] = issued;
    cuda::driver::cuEventRecord(done_[task].get(), streams_[index(order_->tasks()[task].stream)]);
    is_recorded_[task].store(true, std::memory_order_release);
}

void StepMarks::record_all(const std::vector<Issued>& issued) {
    what_ = issued;
    is_one_graph_.store(true, std::memory_order_relaxed);
    for (const TaskNumber task : tasks_) is_recorded_[task].store(true, std::memory_order_release);
}

void StepMarks::cut() noexcept {
    for (std::size_t i = 0; i < tails_.size(); ++i) {
        cuda::api().cuEventRecord(tails_[i].get(), streams_[i]);
    }
    is_cut_.store(true, std::memory_order_release);
    is_whole_.store(true, std::memory_order_release);
}

bool StepMarks::look(std::int64_t now, bool is_oldest) noexcept {
    look_at_host(now);
    look_at_begin(now, is_oldest);
    for (int stream = 0; stream < order_->num_streams(); ++stream) look_at(stream, now);
    const bool all_done = std::ranges::all_of(rows_, [this](const Row& row) {
        return row.at == row.tasks.size() || !has_recorded(row.tasks[row.at]);
    });
    if (!seen_whole_ || !all_done || !all_have_begun()) return false;
    if (!is_cut_ || std::ranges::all_of(tails_, is_reached)) return true;
    if (tail_since_ns_ == 0) tail_since_ns_ = now;
    return false;
}

void StepMarks::look_at_host(std::int64_t now) {
    // In this order: where all is issued, all records are seen.
    seen_whole_ = is_whole_.load(std::memory_order_acquire);
    const std::size_t before = num_issued_;
    for (const TaskNumber task : std::span(tasks_).subspan(before)) {
        seen_[task] = is_recorded_[task].load(std::memory_order_acquire);
    }
    while (num_issued_ < tasks_.size() && seen_[tasks_[num_issued_]]) ++num_issued_;
    if (host_since_ns_ == 0 || num_issued_ != before) host_since_ns_ = now;
}

void StepMarks::look_at_begin(std::int64_t now, bool is_oldest) {
    const int num_begun = num_begun_.load(std::memory_order_acquire);
    for (int lane = 0; lane < lanes_->size(); ++lane) {
        if (begun_[index(lane)]) continue;
        begun_[index(lane)] = lane < num_begun ? is_reached(begin_[index(lane)]) : seen_whole_;
    }
    if (all_have_begun() || num_begun < lanes_->size() || !is_oldest) {
        begin_since_ns_ = 0;
    } else if (begin_since_ns_ == 0) {
        begin_since_ns_ = now;
    }
}

void StepMarks::look_at(int stream, std::int64_t now) {
    Row& row = rows_[index(stream)];
    const auto is_issued = [&] {
        return row.at < row.tasks.size() && has_recorded(row.tasks[row.at]);
    };
    while (is_issued() && is_reached(done_[row.tasks[row.at]])) {
        ++row.at;
        row.since_ns = 0;
    }
    if (!is_issued() || !stream_has_begun(stream) || !lacking(stream).empty()) {
        row.since_ns = 0;
    } else if (row.since_ns == 0) {
        row.since_ns = now;
    }
}

std::int64_t StepMarks::longest_ns(std::int64_t now) const {
    std::int64_t since = now;
    const auto add = [&](std::int64_t other) {
        if (other != 0) since = std::min(since, other);
    };
    for (const Row& row : rows_) add(row.since_ns);
    add(begin_since_ns_);
    add(tail_since_ns_);
    if (!seen_whole_) add(host_since_ns_);
    return now - since;
}

std::optional<TaskNumber> StepMarks::current(int stream) const {
    const Row& row = rows_[index(stream)];
    if (row.at == row.tasks.size()) return {};
    return row.tasks[row.at];
}

std::optional<TaskNumber> StepMarks::last_issued(int stream) const {
    const std::vector<TaskNumber>& tasks = rows_[index(stream)].tasks;
    const auto next =
        std::ranges::find_if_not(tasks, [this](auto task) { return has_recorded(task); });
    if (next == tasks.begin()) return {};
    return *std::prev(next);
}

std::vector<TaskNumber> StepMarks::lacking(int stream) const {
    std::vector<TaskNumber> lacking;
    const std::optional<TaskNumber> task = current(stream);
    if (!task) return lacking;
    std::ranges::copy_if(order_->waits(*task), std::back_inserter(lacking),
                         [this](auto input) { return !is_done(input); });
    return lacking;
}

std::optional<TaskNumber> StepMarks::host_task() const {
    if (seen_whole_ || num_issued_ == tasks_.size()) return {};
    return tasks_[num_issued_];
}

// A task of another half was issued by another job, whose steps are looked at as well.
bool StepMarks::is_done(TaskNumber task) const {
    const Row& row = rows_[index(order_->tasks()[task].stream)];
    return place_[task] == kNever || place_in_row_[task] < row.at;
}

bool StepMarks::all_have_begun() const {
    return std::ranges::all_of(begun_, [](bool begun) { return begun; });
}

bool StepMarks::stream_has_begun(int stream) const {
    if (stream < order_->num_devices()) return has_begun(stream);
    const CopyStream& ends = order_->copy_streams()[index(stream - order_->num_devices())];
    return has_begun(ends.sender) && has_begun(ends.receiver);
}

}  // namespace pykern
