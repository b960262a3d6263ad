// Step marks: an event behind each task of one issued step, by which another thread sees how far
// the streams are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "exec/lanes.hpp"
#include "exec/stream_order.hpp"

namespace pykern {

class StreamJob;

// One thread issues the step and records the marks, or one for each lane. One other at a time
// looks. Marks outlive their job, since a step may run on when nobody holds the program any more.
class StepMarks {
   public:
    // The work that a task has issued: the bytes that it copies, behind a CUDA graph where one is
    // launched.
    struct Issued {
        std::size_t bytes = 0;
        bool is_graph = false;
    };

    explicit StepMarks(const StreamJob& job);

    // Takes the marks for a step. False where a step under way has them.
    bool take();
    // The step is over.
    void release() { taken_.store(false, std::memory_order_release); }
    // The step has stalled, and nobody looks any more.
    void give_up() { given_up_.store(true, std::memory_order_release); }
    // Waits on the host, while another thread looks, until no step has the marks. False where a
    // step that was given up is not over.
    bool settle();

    // By the thread that issues. The lane's stream waits for its caller; lanes in their order.
    void begin(int lane);
    // Behind the task, by the thread that has issued it.
    void record(TaskNumber task, Issued issued);
    // The same for all tasks at once, by task: their events are recorded by nodes of a graph, which
    // was launched.
    void record_all(const std::vector<Issued>& issued);
    // The event behind a task.
    cuda::CUevent done(TaskNumber task) const { return done_[task].get(); }
    // All is issued.
    void finish() { is_whole_.store(true, std::memory_order_release); }
    // Nothing more is issued, though a task may have issued a part of its work. Errors of the
    // driver are ignored, because there is a failure to report already.
    void cut() noexcept;

    // Sees how far the streams are. Returns whether the step is over. Whether what the callers'
    // streams held is late can be told of the oldest step alone: others wait for it. Work of a
    // lost context counts as done.
    bool look(std::int64_t now, bool is_oldest) noexcept;
    // For how long something has been at work that does not wait for other tasks of the step, at
    // most: a task, what is before the step, or the thread that issues.
    std::int64_t longest_ns(std::int64_t now) const;

    // As it was at the last look.
    const StreamOrder& order() const { return *order_; }
    const Lanes& lanes() const { return *lanes_; }
    // The first task of a stream that is not done; nothing where all are.
    std::optional<TaskNumber> current(int stream) const;
    std::optional<TaskNumber> last_issued(int stream) const;
    const Issued& issued(TaskNumber task) const { return what_[task]; }
    // Whether one graph holds all tasks of the step.
    bool is_one_graph() const { return is_one_graph_.load(std::memory_order_relaxed); }
    // Whether the current task is issued and all it waits for is done, and for how long.
    bool is_at_work(int stream) const { return rows_[index(stream)].since_ns != 0; }
    std::int64_t ns(int stream, std::int64_t now) const {
        return now - rows_[index(stream)].since_ns;
    }
    // The tasks that the current one waits for and that are not done.
    std::vector<TaskNumber> lacking(int stream) const;
    // Whether the lane's stream has come past what its caller's held before the step.
    bool has_begun(int lane) const { return begun_[index(lane)]; }
    // The first task in the order of the job that is not issued: its thread is in it or about to
    // be. Nothing where all are issued.
    std::optional<TaskNumber> host_task() const;
    std::int64_t host_ns(std::int64_t now) const { return now - host_since_ns_; }
    // Whether the step waits for what the callers' streams held before it, and for how long.
    bool is_at_begin() const { return begin_since_ns_ != 0; }
    std::int64_t begin_ns(std::int64_t now) const { return now - begin_since_ns_; }
    // Whether the step has failed before all was issued.
    bool is_cut() const { return is_cut_.load(std::memory_order_relaxed); }
    // Whether all tasks are done, and what a failed one has issued is not.
    bool is_at_tail() const { return tail_since_ns_ != 0; }

   private:
    // A stream's tasks that are done are those before `at`.
    struct Row {
        std::vector<TaskNumber> tasks;
        std::size_t at = 0;
        std::int64_t since_ns = 0;
    };

    static std::size_t index(int number) { return static_cast<std::size_t>(number); }
    bool has_recorded(TaskNumber task) const { return seen_[task]; }
    bool is_done(TaskNumber task) const;
    bool all_have_begun() const;
    bool stream_has_begun(int stream) const;
    void look_at_host(std::int64_t now);
    void look_at_begin(std::int64_t now, bool is_oldest);
    void look_at(int stream, std::int64_t now);

    std::shared_ptr<const StreamOrder> order_;
    std::shared_ptr<const Lanes> lanes_;
    std::vector<TaskNumber> tasks_;   // in the order in which they are issued
    std::vector<std::size_t> place_;  // by task, there; behind all for one that the job leaves out
    std::vector<std::size_t> place_in_row_;
    std::vector<cuda::Event> begin_;  // by lane
    std::vector<cuda::Event> done_;   // by task
    // One for every stream, and for the second half of each copy stream by way of the host.
    std::vector<cuda::CUstream> streams_;
    std::vector<cuda::Event> tails_;

    std::atomic<bool> taken_ = false;
    std::atomic<bool> given_up_ = false;
    // Written by threads that issue. Release behind the record that they tell of, since an event
    // that was never recorded counts as done.
    std::atomic<int> num_begun_ = 0;
    std::vector<std::atomic<bool>> is_recorded_;  // by task
    std::atomic<bool> is_whole_ = false;
    std::atomic<bool> is_cut_ = false;
    std::atomic<bool> is_one_graph_ = false;
    std::vector<Issued> what_;

    // The last look. Where a time is 0, nothing of the kind is at work.
    std::vector<Row> rows_;
    std::vector<bool> begun_;
    std::vector<bool> seen_;      // by task: whether it was recorded
    std::size_t num_issued_ = 0;  // tasks in the order of the job before the first that was not
    bool seen_whole_ = false;
    std::int64_t host_since_ns_ = 0;
    std::int64_t begin_since_ns_ = 0;
    std::int64_t tail_since_ns_ = 0;
};

}  // namespace pykern
