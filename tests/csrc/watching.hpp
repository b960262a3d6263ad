// Shared by tests of a watch: its patience, a file whose text can be read, and the begin of a
// report.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>

#include "exec/stream_order.hpp"
#include "plan/text.hpp"

namespace pykern {

// For how long a watch lets nothing happen.
inline constexpr std::chrono::milliseconds kPatience{300};

// A file whose text can be read.
class Sink {
   public:
    Sink() { REQUIRE(pipe2(ends_.data(), O_CLOEXEC | O_NONBLOCK) == 0); }
    ~Sink() {
        for (const int end : ends_) close(end);
    }
    Sink(const Sink&) = delete;
    Sink& operator=(const Sink&) = delete;

    int file() const { return ends_[1]; }
    std::string text() const {
        std::array<char, 1 << 16> text{};
        const ssize_t size = read(ends_[0], text.data(), text.size());
        return {text.data(), size < 0 ? 0 : static_cast<std::size_t>(size)};
    }

   private:
    std::array<int, 2> ends_{};
};

inline bool never() { return false; }

inline std::string first_line(const StreamOrder& order, TaskNumber number) {
    const Task& task = order.tasks()[number];
    return "stage " + std::to_string(task.action.stage) + ", microbatch " +
           std::to_string(task.action.microbatch) + ", action " + to_text(task.action) +
           ", device " + std::to_string(order.device_of_stream(task.stream)) +
           " has not ended for 0.";
}

}  // namespace pykern
