// Schedule: an order with the times and the memory that it takes; the fixed-order evaluation.
//
// A change is tried on one row and timed from the first moment that it can touch. A try's times are
// kept beside the accepted schedule until `accept`, so a rejected change costs nothing to undo.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "search/order.hpp"
#include "search/problem.hpp"

namespace pykern {

inline constexpr Ticks kNever = std::numeric_limits<Ticks>::max() / 4;

class Schedule {
   public:
    explicit Schedule(const Problem& problem);

    // Takes over an order. False where it cannot run or breaks a cap; then nothing else may be
    // asked of it.
    bool load(const Order& order);

    const Problem& problem() const { return problem_; }
    Ticks makespan() const { return makespan_; }
    const std::vector<Labelled>& row(std::size_t device) const { return rows_[device]; }
    Ticks start(std::size_t device, std::size_t position) const {
        return starts_[device][position];
    }
    // Most that the device holds at once.
    Ticks peak(std::size_t device) const;
    Order order() const;
    // Ticks per microbatch in the steady part: what one more of them would cost.
    Ticks pace() const;

    // The position whose end the start of this one waits for, or nothing at time 0.
    std::optional<std::pair<std::size_t, std::size_t>> critical_input(std::size_t device,
                                                                      std::size_t position) const;
    // A device and position that end last.
    std::pair<std::size_t, std::size_t> last() const;

    // The row to change before `try_row`: a copy of the device's row.
    std::vector<Labelled>& edit(std::size_t device);
    // Times the edited row, whose positions before `first` are as they were and whose memory is as
    // it was behind `last`. True where it is legal, under the cap and ends by `limit`.
    bool try_row(std::size_t first, std::size_t last, Ticks limit);
    void accept();

    // Actions timed so far, and what else was charged: what a search may have too much of.
    std::int64_t work() const { return work_; }
    void charge(std::int64_t work) { work_ += work; }

   private:
    struct Times {
        Ticks start;
        Ticks end;
        std::uint32_t trial;
        std::uint32_t position;
    };

    void fill_tables();
    void fill_tails();
    bool weigh(std::size_t device, std::size_t first);
    bool within_cap(std::size_t first, std::size_t last) const;
    bool time_from(Ticks moment, Ticks limit);
    void rewind(Ticks moment, std::size_t first);
    bool run_row(std::size_t device, Ticks moment, Ticks limit);
    Ticks end(std::size_t device, std::size_t position) const {
        return starts_[device][position] + problem_.time[rows_[device][position].symbol];
    }
    const std::vector<Labelled>& tried_row(std::size_t device) const {
        return device == edited_ ? edit_ : rows_[device];
    }

    const Problem& problem_;
    // Per symbol: where its output is written and its input from another stage is read, kNone for
    // neither; who waits for it; the least time from its start to the end of the step.
    std::vector<std::size_t> writes_;
    std::vector<std::size_t> reads_;
    std::vector<Ticks> read_hop_;
    std::vector<std::size_t> reader_;
    std::vector<Ticks> tail_;

    std::vector<std::vector<Labelled>> rows_;
    std::vector<std::vector<Ticks>> starts_;
    std::vector<std::vector<Ticks>> held_;  // memory before each position
    std::vector<std::vector<Ticks>> left_;  // work from each position on
    std::vector<Times> accepted_;           // per cell
    Ticks makespan_ = 0;

    std::size_t edited_ = 0;
    std::vector<Labelled> edit_;
    std::vector<Times> tried_;
    std::vector<std::vector<Ticks>> tried_starts_;
    std::vector<std::size_t> next_;
    std::vector<std::size_t> from_;
    std::vector<Ticks> clock_;
    std::vector<Ticks> to_do_;  // work of the positions from next_ on
    std::vector<std::uint8_t> queued_;
    std::vector<std::size_t> queue_;
    std::uint32_t trial_ = 0;
    Ticks tried_makespan_ = 0;
    std::int64_t work_ = 0;
};

}  // namespace pykern
