// Stream watch: steps of streams that take too long are told of, by a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "exec/step_marks.hpp"

namespace pykern {

// A step does not end. The watch has the report.
class StreamsStalled : public std::exception {};

// Looks at the marks of steps under way. Where a task takes longer than the patience, though all it
// waits for is done, the watch writes its report to a file, once, and looks no further.
//
//     StreamWatch watch(60s, STDERR_FILENO);
//     Dispatch(job, callers, client, false, nullptr, &watch).run();
//     if (!watch.settle([] { return false; })) throw std::runtime_error(watch.report());
class StreamWatch {
   public:
    // `file` is a descriptor. Throws std::system_error where the system refuses the thread.
    StreamWatch(std::chrono::nanoseconds patience, int file);
    StreamWatch(const StreamWatch&) = delete;
    StreamWatch& operator=(const StreamWatch&) = delete;
    // Steps under way are watched no further, and count as over.
    ~StreamWatch();

    // A step begins, with these marks.
    void add(std::shared_ptr<StepMarks> step);
    // Throws StreamsStalled where a step has stalled.
    void require_progress();
    // Empty as long as nothing has stalled.
    std::string report();
    // Waits on the host until `enough` is true or all steps are over. False where one stalls.
    bool settle(const std::function<bool()>& enough);
    // A step has failed: waits for it on the host. Where one has stalled, later work of the callers
    // is to come after it all the same, which `end` sees to. Errors of the driver are ignored,
    // because there is a failure to report already.
    void drain(StepMarks& failed, const std::function<void()>& end) noexcept;

   private:
    void loop();
    // With the lock.
    void look() noexcept;
    void release_all() noexcept;

    std::chrono::nanoseconds patience_;
    int file_;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool closing_ = false;                          // guarded by mutex_
    std::deque<std::shared_ptr<StepMarks>> steps_;  // the oldest first; guarded by mutex_
    std::string report_;                            // guarded by mutex_
    std::atomic<bool> stalled_ = false;             // for who looks without the lock
    std::thread thread_;                            // the last member, since it uses the others
};

}  // namespace pykern
