#include "cuda/lasting.hpp"

#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

namespace pykern::cuda {

namespace {

using Queue = std::deque<std::unique_ptr<MadeStream>>;

// Leaked: when the process ends, the driver ends its streams.
struct Idle {
    std::mutex mutex;
    std::map<std::pair<int, StreamUse>, Queue> streams;
    const pid_t process = getpid();

    // A child after a fork has none of them, and another thread of its parent may hold the lock.
    bool is_here() const { return process == getpid(); }
};
Idle& idle() {
    static auto* const all = new Idle;
    return *all;
}

std::unique_ptr<MadeStream> next_idle(int device, StreamUse use) {
    if (!idle().is_here()) return nullptr;
    const std::scoped_lock lock(idle().mutex);
    Queue& queue = idle().streams[{device, use}];
    if (queue.empty()) return nullptr;
    std::unique_ptr<MadeStream> next = std::move(queue.front());
    queue.pop_front();
    return next;
}

// Waits for what the stream had before. False where its context has been lost or reset since.
bool still_works(const MadeStream& made) {
    try {
        const CurrentContext current(made.primary.get());
        driver::cuStreamSynchronize(made.stream.get());
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

}  // namespace

void GiveBack::operator()(MadeStream* made) const noexcept {
    std::unique_ptr<MadeStream> owned(made);
    if (!idle().is_here()) return;
    try {
        const std::scoped_lock lock(idle().mutex);
        idle().streams[{made->primary.device(), made->use}].push_back(std::move(owned));
    } catch (const std::exception&) {
        return;
    }
}

LastingStream take_stream(int device, StreamUse use) {
    while (auto next = next_idle(device, use)) {
        if (still_works(*next)) return LastingStream(std::move(next));
    }
    PrimaryContext primary(device);
    Stream stream = make_stream(primary.get());
    return LastingStream(std::make_unique<MadeStream>(std::move(primary), use, std::move(stream)));
}

void destroy_idle_streams() {
    std::map<std::pair<int, StreamUse>, Queue> gone;
    const std::scoped_lock lock(idle().mutex);
    gone.swap(idle().streams);
}

}  // namespace pykern::cuda
