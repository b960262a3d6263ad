// The capture of a stream, and of those that wait for it: operations with what orders them.
#pragma once

#include <c10/util/Exception.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver.hpp"

namespace oracle {

using Pool = std::int64_t;
using Nodes = std::set<std::size_t>;

// The operations of a graph. They stay to the end of the test, since graphs that have it as their
// child call them as well.
struct Recorded {
    void* graph;
    Pool pool;
    bool is_alive = true;
    std::deque<std::function<void()>> operations;
};

// Replays raise nothing.
struct Failures {
    std::mutex lock;
    std::vector<std::string> texts;

    void add(std::string text) {
        const std::lock_guard hold(lock);
        texts.push_back(std::move(text));
    }
};
inline Failures failures;

struct Operation {
    Recorded* of;
    std::function<void()>* run;
};

// Called by the fake driver, which no exception may pass through.
inline void replay(void* argument) {
    const auto& operation = *static_cast<Operation*>(argument);
    ++counts.replayed;
    try {
        TORCH_CHECK(operation.of->is_alive, "the memory of a graph is gone when it is launched");
        (*operation.run)();
    } catch (const std::exception& error) {
        failures.add(error.what());
    }
}

class Capture {
   public:
    Capture(Recorded& into, Handle origin, Pool pool)
        : into_(into), origin_(origin), pool_(pool), last_{{origin, {}}} {}

    bool has(Handle stream) const { return last_.contains(stream); }
    Pool pool() const { return pool_; }
    bool is_empty() const { return after_.empty(); }

    void add(Handle stream, std::vector<Access> accesses, std::function<void()> run) {
        const Nodes before = std::exchange(last_.at(stream), Nodes{after_.size()});
        const std::vector<std::size_t> after(before.begin(), before.end());
        into_.operations.push_back(std::move(run));
        arguments.push_back({&into_, &into_.operations.back()});
        constexpr double kDurationNs = 1000;
        driver.add_node(into_.graph, kDurationNs, &replay, &arguments.back(), accesses.data(),
                        accesses.size(), after.data(), after.size());
        after_.push_back(before);
        ++counts.captured;
    }

    void record(void* event, Handle stream) { events_[event] = last_.at(stream); }
    // Whether the event was recorded in this capture, which then has the stream.
    bool wait(void* event, Handle stream, bool is_default) {
        const auto found = events_.find(event);
        if (found == events_.end()) return false;
        if (is_default) refuse("the default stream, which no graph has, waits for it");
        if (!has(stream)) ++counts.forks;
        last_[stream].insert(found->second.begin(), found->second.end());
        return true;
    }
    void forget(void* event) { events_.erase(event); }

    void break_off() { is_broken_ = true; }
    void refuse(const char* why) {
        break_off();
        TORCH_CHECK(false, "operation not permitted when stream is capturing: ", why);
    }

    // Why the capture cannot end well, if it cannot.
    std::optional<std::string> end() const {
        if (is_broken_) return "operation failed due to a previous error during capture";
        std::vector<bool> joined(after_.size());
        std::vector<std::size_t> open(last_.at(origin_).begin(), last_.at(origin_).end());
        while (!open.empty()) {
            const std::size_t node = open.back();
            open.pop_back();
            if (joined[node]) continue;
            joined[node] = true;
            open.insert(open.end(), after_[node].begin(), after_[node].end());
        }
        for (const bool is : joined) {
            if (!is) return "capturing stream has unjoined work";
        }
        return std::nullopt;
    }

    inline static std::deque<Operation> arguments;

   private:
    Recorded& into_;
    Handle origin_;
    Pool pool_;
    // By stream: the operations that its next comes after.
    std::map<Handle, Nodes> last_;
    std::map<void*, Nodes> events_;
    std::vector<Nodes> after_;
    bool is_broken_ = false;
};

// One at a time. Threads of autograd's engine take part in it.
struct Captures {
    std::recursive_mutex lock;
    std::optional<Capture> now;
    std::deque<Recorded> all;
};
inline Captures captures;

// Calls the function with the capture that has the stream, if any; returns whether there is one.
template <class Function>
bool if_captured(Handle stream, Function function) {
    const std::lock_guard hold(captures.lock);
    if (!captures.now || !captures.now->has(stream)) return false;
    function(*captures.now);
    return true;
}

inline Pool pool_of(Handle stream) {
    Pool pool = 0;
    if_captured(stream, [&](const Capture& capture) { pool = capture.pool(); });
    return pool;
}

// For a result of the driver's, or 900 for a call that breaks a capture.
inline void require_success(int error) {
    constexpr int kCaptureUnsupported = 900;
    if (error == kCaptureUnsupported) {
        const std::lock_guard hold(captures.lock);
        if (captures.now) captures.now->break_off();
        TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing");
    }
    TORCH_CHECK(error == 0, "CUDA error ", error);
}
// Calls of torch's that the driver forbids beside captures.
inline void require_safe(const char* call) {
    if (driver.unsafe(call) == 0) require_success(900);
}

inline void refuse_in_capture(Handle stream, const char* why) {
    if_captured(stream, [&](Capture& capture) { capture.refuse(why); });
}

}  // namespace oracle
