// Streams, and who runs next: at random, among what streams and events allow.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "driver_model/fake.hpp"
#include "driver_model/order.hpp"

namespace pykern::fake {

using Random = std::mt19937_64;

// The mark that a record leaves: which work is before it, when that ends, and whether it has been
// reached.
struct Mark {
    Clock clock;
    double time_ns = 0;
    int step = 0;
    bool done = false;
};

// The head of a stream's queue waits for a mark, moves data, sets a mark, or does nothing. One that
// hangs does not end before it is let go.
struct Work {
    std::shared_ptr<const Mark> waits_for;
    std::function<void()> run;
    std::shared_ptr<Mark> mark;
    std::vector<std::shared_ptr<Mark>> marks_within;  // which `run` sets
    std::vector<FakeAccess> accesses;
    bool hangs = false;
};

// Order and times are known when work is issued, whenever it runs.
struct Stream : std::enable_shared_from_this<Stream> {
    std::size_t index = 0;
    cuda::CUcontext context = nullptr;
    int device = 0;
    Clock clock;
    double end_ns = 0;
    std::deque<Work> queue;
};

// The unfinished work issued first is always ready, since an event is waited for as it was recorded
// before the call, or hangs: so running until something is done ends.
class Schedule {
   public:
    explicit Schedule(std::uint64_t seed) : random_(seed) {}

    void set_eagerness(double probability) { eagerness_ = probability; }
    // Kept when it is destroyed: its work still runs, and is waited for with its context.
    void add(std::shared_ptr<Stream> stream) { streams_.push_back(std::move(stream)); }
    const std::vector<std::shared_ptr<Stream>>& streams() const { return streams_; }
    Random& random() { return random_; }

    void run_some();
    void run_all();
    // False where work that hangs is in the way.
    bool run_until(const std::function<bool()>& done);
    bool complete(const Stream& stream);
    // Nothing that is under way runs any more, and nobody waits for it.
    void drop_all();

   private:
    bool run_one();
    bool hangs() const;

    Random random_;
    double eagerness_ = 0.5;
    std::vector<std::shared_ptr<Stream>> streams_;
};

}  // namespace pykern::fake
