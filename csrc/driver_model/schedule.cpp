#include "driver_model/schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pykern::fake {
namespace {

bool ready(const Stream& stream) {
    if (stream.queue.empty() || stream.queue.front().hangs) return false;
    const auto& mark = stream.queue.front().waits_for;
    return mark == nullptr || mark->done;
}

}  // namespace

bool Schedule::run_one() {
    std::vector<Stream*> heads;
    for (const auto& stream : streams_) {
        if (ready(*stream)) heads.push_back(stream.get());
    }
    if (heads.empty()) return false;
    std::uniform_int_distribution<std::size_t> any(0, heads.size() - 1);
    Stream& stream = *heads[any(random_)];
    // Taken off first: what it runs may free memory and so come back here.
    const Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (work.run) work.run();
    if (work.mark) work.mark->done = true;
    return true;
}

void Schedule::run_some() {
    while (std::bernoulli_distribution(eagerness_)(random_) && run_one()) continue;
}

void Schedule::run_all() {
    while (run_one()) continue;
}

bool Schedule::run_until(const std::function<bool()>& done) {
    while (!done()) {
        if (run_one()) continue;
        if (hangs()) return false;
        throw std::logic_error("the fake driver: nothing is ready to run");
    }
    return true;
}

bool Schedule::hangs() const {
    return std::ranges::any_of(streams_, [](const auto& stream) {
        return !stream->queue.empty() && stream->queue.front().hangs;
    });
}

bool Schedule::complete(const Stream& stream) {
    return run_until([&] { return stream.queue.empty(); });
}

void Schedule::drop_all() {
    for (const auto& stream : streams_) {
        for (const Work& work : stream->queue) {
            if (work.mark) work.mark->done = true;
            for (const std::shared_ptr<Mark>& mark : work.marks_within) mark->done = true;
        }
        stream->queue.clear();
    }
}

}  // namespace pykern::fake
