// Trace: a ring of the last steps, when each action started and ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/program.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// Nanoseconds of a clock that never goes back.
std::int64_t now_ns();

// Every action owns its entry of the step's slot, so workers write without synchronising. Steps
// that have ended may be read meanwhile: the step in progress has a slot that cannot be read.
class Trace {
   public:
    static constexpr std::size_t kSteps = 8;

    explicit Trace(std::size_t num_actions)
        : num_actions_(num_actions), ring_(num_actions * (kSteps + 1)) {}

    // Begins a step: empties the slot that cannot be read.
    void begin();
    // Ends it, which makes it the last step. The oldest one is forgotten.
    void end() { num_ended_.fetch_add(1, std::memory_order_release); }
    void record(Position position, std::int64_t start_ns, std::int64_t end_ns) {
        Entry& entry = slot()[position];
        entry.start_ns = start_ns;
        // Relaxed: who asks meanwhile takes either answer; readers of the step come after its end.
        std::atomic_ref(entry.end_ns).store(end_ns, std::memory_order_relaxed);
    }
    // Whether the action has run in the step in progress. By any thread.
    bool has_run(Position position) {
        return std::atomic_ref(slot()[position].end_ns).load(std::memory_order_relaxed) != 0;
    }
    // How many steps can be read.
    std::size_t size() const {
        return std::min(num_ended_.load(std::memory_order_acquire), kSteps);
    }
    // The step `ago` steps before the last one; actions that did not run are left out.
    Timeline timeline(const Program& program, std::size_t ago) const;

   private:
    struct Entry {
        std::int64_t start_ns = 0;
        std::int64_t end_ns = 0;  // 0: the action has not run
    };

    std::size_t slot_begin(std::size_t step) const { return step % (kSteps + 1) * num_actions_; }
    Entry* slot() { return ring_.data() + slot_begin(num_ended_.load(std::memory_order_relaxed)); }

    std::size_t num_actions_;
    std::vector<Entry> ring_;
    std::atomic<std::size_t> num_ended_{0};
};

}  // namespace pykern
