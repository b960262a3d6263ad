// Pace: how long the actions of a stage take, as far as the executor has seen.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "plan/action.hpp"

namespace pykern {

// How often the caller of a step looks for interrupts. A step that takes less is short.
inline constexpr std::chrono::milliseconds kInterruptTick{20};

// Any thread may read; the thread that just ran an action of (kind, stage) updates its entry, two
// at once where the stage has replicas. Relaxed order throughout: an old value leads to a slower
// choice, never to a wrong one.
class Pace {
   public:
    explicit Pace(int num_stages)
        : num_stages_(static_cast<std::size_t>(num_stages)), ns_(num_stages_ * kNumKinds) {
        for (auto& entry : ns_) entry.store(kUnknown, std::memory_order_relaxed);
    }

    std::int64_t expected_ns(Action action) const {
        return ns_[entry(action)].load(std::memory_order_relaxed);
    }

    // Falls at once and rises slowly: a thread that was held up says little about the action.
    void observe(Action action, std::int64_t ns) {
        auto& entry_ns = ns_[entry(action)];
        const std::int64_t old = entry_ns.load(std::memory_order_relaxed);
        entry_ns.store(ns < old ? ns : old + (ns - old) / 8, std::memory_order_relaxed);
    }

   private:
    static constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();

    std::size_t entry(Action action) const {
        return static_cast<std::size_t>(action.kind) * num_stages_ + action.stage;
    }

    std::size_t num_stages_;
    std::vector<std::atomic<std::int64_t>> ns_;
};

}  // namespace pykern
