// Happens-before between the work of several streams, by vector clocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pykern::fake {

// One piece of work: the stream it is on, and its number there, from 1.
struct Point {
    std::size_t stream = 0;
    std::uint64_t number = 0;
};

// All work that is ordered before something: of each stream, everything up to a number.
class Clock {
   public:
    void join(const Clock& other) {
        if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
        for (std::size_t i = 0; i < other.counts_.size(); ++i) {
            counts_[i] = std::max(counts_[i], other.counts_[i]);
        }
    }

    // The next work of a stream.
    Point advance(std::size_t stream) {
        if (counts_.size() <= stream) counts_.resize(stream + 1);
        return {stream, ++counts_[stream]};
    }

    // The last work of a stream so far.
    Point last(std::size_t stream) const {
        return {stream, stream < counts_.size() ? counts_[stream] : 0};
    }

    bool covers(Point point) const {
        return point.stream < counts_.size() && counts_[point.stream] >= point.number;
    }

   private:
    std::vector<std::uint64_t> counts_;
};

}  // namespace pykern::fake
