// Ranges for torch.profiler.
//
// They have kind, stage, microbatch and device of their action as text ("pykern F s2 mb0 dev1"),
// or the text "pykern step". The core does not link torch: Python hands over two functions of
// torch's C interface while a profile is recorded, and none otherwise.
#pragma once

#include <atomic>
#include <cstdint>

#include "plan/action.hpp"
#include "plan/timeline.hpp"

namespace pykern {

// aoti_record_function_start and aoti_record_function_end of torch's shim.h.
using TorchRangeStart = std::int32_t (*)(const char* text, void* kwargs, void* const* inputs,
                                         std::uint64_t num_inputs, void** range);
using TorchRangeEnd = std::int32_t (*)(void* range);

// A range on this thread.
class [[nodiscard]] TorchRange {
   public:
    // Has ranges that begin from now on reach torch.profiler, or not where `start` is null.
    // `sees_workers`: whether the profile records threads other than the caller's.
    static void reach(TorchRangeStart start, TorchRangeEnd end, bool sees_workers) noexcept;
    // Whether a profile is recorded that does not see what workers run.
    static bool misses_workers() noexcept;
    // Tells such a profile what workers have run, each action by a range on this thread whose text
    // goes on with its time: "pykern F s2 mb0 dev1 at 1200 for 800 ns".
    static void tell(const Timeline& timeline) noexcept;

    // Around a step.
    TorchRange() noexcept {
        if (start_of_range.load(std::memory_order_relaxed) != nullptr) begin("pykern step");
    }
    // Around an action on a device; that of a copy is the sender.
    TorchRange(Action action, int device) noexcept {
        if (start_of_range.load(std::memory_order_relaxed) != nullptr) begin(action, device);
    }
    TorchRange(const TorchRange&) = delete;
    TorchRange& operator=(const TorchRange&) = delete;
    ~TorchRange() {
        if (range_ != nullptr) end();
    }

   private:
    explicit TorchRange(const char* text) noexcept { begin(text); }

    void begin(const char* text) noexcept;
    void begin(Action action, int device) noexcept;
    void end() noexcept;

    // Looked at inline, since nearly no step is recorded.
    static std::atomic<TorchRangeStart> start_of_range;

    void* range_ = nullptr;
};

}  // namespace pykern
