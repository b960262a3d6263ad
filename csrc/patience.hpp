// Patience: a timeout as Python gives it, and the threads that watch it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace pykern {

// At most what fits with room to spare.
inline std::chrono::nanoseconds nanoseconds_of(double seconds) {
    constexpr double kLongestS = 1e9;
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kLongestS) * 1e9));
}

// A watch with a thread of its own. Throws std::runtime_error where the system refuses the thread.
template <class Watch, class... Arguments>
std::unique_ptr<Watch> watching(Arguments&&... arguments) {
    try {
        return std::make_unique<Watch>(std::forward<Arguments>(arguments)...);
    } catch (const std::system_error& error) {
        throw std::runtime_error("timeout needs a thread, and the system refused that thread: " +
                                 error.code().message() +
                                 ". Omit timeout, or raise the limit of threads (ulimit -u, "
                                 "pids.max of the container) or of memory (ulimit -v)");
    }
}

}  // namespace pykern
