#include "exec/stream_watch.hpp"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "exec/stall_report.hpp"
#include "exec/trace.hpp"
#include "exec/watchdog.hpp"

namespace pykern {

namespace {

using std::chrono_literals::operator""ms;

// A stall is seen after one look too many, and its begin one look late: so the report is late by
// half of the patience at most, and by half a second.
std::chrono::nanoseconds period_of_looks(std::chrono::nanoseconds patience) {
    return std::clamp<std::chrono::nanoseconds>(patience / 4, 5ms, 250ms);
}

// Queries of this thread leave captures of other threads alone, in whichever mode those are.
class AsideOfCaptures {
   public:
    AsideOfCaptures() { cuda::api().cuThreadExchangeStreamCaptureMode(&mode_); }
    ~AsideOfCaptures() { cuda::api().cuThreadExchangeStreamCaptureMode(&mode_); }
    AsideOfCaptures(const AsideOfCaptures&) = delete;
    AsideOfCaptures& operator=(const AsideOfCaptures&) = delete;

   private:
    int mode_ = cuda::kCaptureRelaxed;
};

}  // namespace

StreamWatch::StreamWatch(std::chrono::nanoseconds patience, int file)
    : patience_(patience), file_(file), thread_([this] { loop(); }) {}

StreamWatch::~StreamWatch() {
    {
        const std::scoped_lock lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }
    thread_.join();
    if (report_.empty()) release_all();
}

void StreamWatch::add(std::shared_ptr<StepMarks> step) {
    const std::scoped_lock lock(mutex_);
    if (!report_.empty()) step->give_up();
    steps_.push_back(std::move(step));
    changed_.notify_all();
}

void StreamWatch::require_progress() {
    if (stalled_.load(std::memory_order_relaxed)) throw StreamsStalled();
}

std::string StreamWatch::report() {
    const std::scoped_lock lock(mutex_);
    return report_;
}

bool StreamWatch::settle(const std::function<bool()>& enough) {
    for (;;) {
        {
            const std::scoped_lock lock(mutex_);
            look();
            if (!report_.empty()) return false;
            if (steps_.empty()) return true;
        }
        if (enough()) return true;
        std::this_thread::sleep_for(1ms);
    }
}

void StreamWatch::drain(StepMarks& failed, const std::function<void()>& end) noexcept {
    if (report().empty()) {
        failed.cut();
        if (settle([] { return false; })) return;
    }
    try {
        end();
    } catch (const std::exception&) {
        return;
    }
}

void StreamWatch::loop() {
    pthread_setname_np(pthread_self(), "pykern streams");
    const std::chrono::nanoseconds period = period_of_looks(patience_);
    std::unique_lock lock(mutex_);
    while (report_.empty()) {
        if (steps_.empty()) {
            changed_.wait(lock, [this] { return closing_ || !steps_.empty(); });
        } else {
            changed_.wait_for(lock, period, [this] { return closing_ || !report_.empty(); });
        }
        if (closing_) break;
        look();
    }
    if (report_.empty()) return;
    const std::string text = "pykern: " + report_ +
                             "\ncalls of the pipeline raise PipelineStalled. A call that waits for "
                             "the GPU outside of pykern does not return: Ctrl-\\ (SIGQUIT) ends "
                             "the process\n";
    lock.unlock();
    write_to(file_, text);
}

void StreamWatch::look() noexcept {
    if (!report_.empty() || steps_.empty()) return;
    try {
        const AsideOfCaptures aside;
        const cuda::CurrentContext current(steps_.front()->lanes().primary(0));
        const std::int64_t now = now_ns();
        while (!steps_.empty() && steps_.front()->look(now, true)) {
            steps_.front()->release();
            steps_.pop_front();
        }
        for (std::size_t i = 0; i < steps_.size(); ++i) {
            if (i > 0) steps_[i]->look(now, false);
            if (steps_[i]->longest_ns(now) < patience_.count()) continue;
            report_ = tell_stall(*steps_[i], steps_.size() - i - 1, now);
            stalled_.store(true, std::memory_order_relaxed);
            for (const std::shared_ptr<StepMarks>& step : steps_) step->give_up();
            changed_.notify_all();
            return;
        }
    } catch (const std::exception&) {
        // Without a driver nothing is under way.
        release_all();
    }
}

void StreamWatch::release_all() noexcept {
    for (const std::shared_ptr<StepMarks>& step : steps_) step->release();
    steps_.clear();
}

}  // namespace pykern
