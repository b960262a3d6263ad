#include "exec/watchdog.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "exec/trace.hpp"

namespace pykern {

namespace {

using std::chrono_literals::operator""ms;

// How often the watchdog looks: four times within its patience, so that a message is late by a
// quarter of it at most. A wait is too short, and there are too many, to wake the watchdog for.
std::chrono::nanoseconds period_of(std::chrono::nanoseconds patience) {
    return std::clamp<std::chrono::nanoseconds>(patience / 4, 10ms, 1000ms);
}

}  // namespace

std::string seconds(std::int64_t ns) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(ns) * 1e-9);
    return text.data();
}

Watchdog::Watchdog(std::chrono::nanoseconds patience, int file, Tell tell)
    : patience_(patience), file_(file), tell_(std::move(tell)), thread_([this] { loop(); }) {}

Watchdog::~Watchdog() {
    {
        const std::scoped_lock lock(mutex_);
        closing_ = true;
        closed_.notify_one();
    }
    thread_.join();
}

Watchdog::Wait::Wait(Watchdog* watchdog) : watchdog_(watchdog) {
    if (watchdog_ == nullptr) return;
    const std::int64_t now = now_ns();
    const std::scoped_lock lock(watchdog_->mutex_);
    watchdog_->waiting_ = true;
    watchdog_->since_ns_ = now;
    watchdog_->told_ = false;
}

Watchdog::Wait::~Wait() {
    if (watchdog_ == nullptr) return;
    const std::scoped_lock lock(watchdog_->mutex_);
    watchdog_->waiting_ = false;
}

void Watchdog::loop() {
    pthread_setname_np(pthread_self(), "pykern watchdog");
    const std::chrono::nanoseconds period = period_of(patience_);
    std::unique_lock lock(mutex_);
    while (!closed_.wait_for(lock, period, [this] { return closing_; })) {
        if (!waiting_ || told_) continue;
        const std::int64_t waited_ns = now_ns() - since_ns_;
        if (waited_ns < patience_.count()) continue;
        told_ = true;
        const std::string text = tell_(waited_ns);
        // A file may take its time, for which the waiting thread does not have to wait as well.
        lock.unlock();
        write_to(file_, text);
        lock.lock();
    }
}

void write_to(int file, const std::string& text) {
    std::size_t begin = 0;
    while (begin < text.size()) {
        const ssize_t written = ::write(file, text.data() + begin, text.size() - begin);
        if (written < 0 && errno == EINTR) continue;
        // Nobody is there to be told that nobody can be told.
        if (written <= 0) return;
        begin += static_cast<std::size_t>(written);
    }
}

}  // namespace pykern
