#include "exec/torch_range.hpp"

#include <array>
#include <cstddef>
#include <cstdio>

#include "plan/text.hpp"

namespace pykern {

namespace {

// The longest is "pykern OFFLOAD s65535 mb4294967295 dev65535" with two times of 19 digits.
using Text = std::array<char, 128>;

// Both stay when a profile ends, since a range may outlive it.
std::atomic<TorchRangeEnd> end_range{nullptr};
std::atomic<bool> sees_all_threads{false};

int print(Text& text, Action action, int device) noexcept {
    return std::snprintf(text.data(), text.size(), "pykern %s s%u mb%u dev%d",
                         kind_name(action.kind), unsigned{action.stage}, action.microbatch, device);
}

}  // namespace

std::atomic<TorchRangeStart> TorchRange::start_of_range{nullptr};

void TorchRange::reach(TorchRangeStart start, TorchRangeEnd end, bool sees_workers) noexcept {
    if (start != nullptr) {
        end_range.store(end, std::memory_order_relaxed);
        sees_all_threads.store(sees_workers, std::memory_order_relaxed);
    }
    // Release: whoever sees the start in `begin` sees the end.
    start_of_range.store(start, std::memory_order_release);
}

bool TorchRange::misses_workers() noexcept {
    return start_of_range.load(std::memory_order_acquire) != nullptr &&
           !sees_all_threads.load(std::memory_order_relaxed);
}

void TorchRange::tell(const Timeline& timeline) noexcept {
    int device = 0;
    for (const auto& row : timeline.rows()) {
        for (const Span& span : row) {
            Text text{};
            const auto used = static_cast<std::size_t>(print(text, span.action, device));
            std::snprintf(text.data() + used, text.size() - used, " at %.0f for %.0f ns",
                          span.start_ns, span.end_ns - span.start_ns);
            const TorchRange told(text.data());
        }
        ++device;
    }
}

void TorchRange::begin(const char* text) noexcept {
    const TorchRangeStart start = start_of_range.load(std::memory_order_acquire);
    // The profile may have ended meanwhile. A range that torch refuses is left out.
    if (start == nullptr || start(text, nullptr, nullptr, 0, &range_) != 0) range_ = nullptr;
}

void TorchRange::begin(Action action, int device) noexcept {
    Text text{};
    print(text, action, device);
    begin(text.data());
}

void TorchRange::end() noexcept { end_range.load(std::memory_order_relaxed)(range_); }

}  // namespace pykern
