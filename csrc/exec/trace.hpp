// Trace: a ring of the last steps, when each action started and ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/program.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// Nanoseconds of a clock that never goes back.
std::int64_t now_ns();

// Every action owns its entry of the step's slot, so workers write without synchronising; reading
// is for the thread that waited for the step.
class Trace {
   public:
    static constexpr std::size_t kSteps = 8;

    explicit Trace(std::size_t num_actions)
        : num_actions_(num_actions), ring_(num_actions * kSteps) {}

    // Begins a step: takes the oldest slot and empties it.
    void begin();
    void record(Position position, std::int64_t start_ns, std::int64_t end_ns) {
        slot()[position] = {start_ns, end_ns};
    }
    // How many steps can be read.
    std::size_t size() const { return count_ < kSteps ? count_ : kSteps; }
    // The step `ago` steps before the last one; actions that did not run are left out.
    Timeline timeline(const Program& program, std::size_t ago) const;

   private:
    struct Entry {
        std::int64_t start_ns = 0;
        std::int64_t end_ns = 0;  // 0: the action has not run
    };

    Entry* slot() { return ring_.data() + ((count_ - 1) % kSteps) * num_actions_; }

    std::size_t num_actions_;
    std::vector<Entry> ring_;
    std::size_t count_ = 0;
};

}  // namespace pykern
