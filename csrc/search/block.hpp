// Block: one microbatch laid out in time and repeated once per period (modulo scheduling).
#pragma once

#include <optional>
#include <vector>

#include "search/order.hpp"
#include "search/problem.hpp"
#include "search/random.hpp"

namespace pykern {

// How a block is laid out, in small whole numbers of a slot: what a search changes.
struct BlockShape {
    int grain = 1;  // slots of an average action, to which times are rounded; 0 for as they are
    bool fused = false;  // B instead of I and W
    int slack = 0;       // slots by which the period is longer than a device's work
    // Quarters of a slot waited at each hop of a leg (a pass over the devices), and slots waited
    // before a leg. The legs of the backward follow those of the forward.
    std::vector<int> hops;
    std::vector<int> turns;
};

BlockShape random_shape(const Problem& problem, Random& random);
// The same with a few numbers changed.
BlockShape changed_shape(const BlockShape& shape, Random& random);

// When each symbol of microbatch 0 runs, kNever where the block has none; those of the others run
// whole periods later. Only the order counts: two may be at the same moment on one device.
struct Block {
    Ticks period = 0;
    std::vector<Ticks> at;
};

// The same with some symbols moved.
Block changed_block(const Block& block, Random& random);

// Turns blocks into orders.
class BlockPlanner {
   public:
    explicit BlockPlanner(const Problem& problem);

    // Nothing where it does not fit the period or the cap.
    const Order* plan(const BlockShape& shape);
    // Nothing where it is not possible or breaks the cap.
    const Order* plan(const Block& block);
    // The block that the last plan was made of.
    const Block& block() const { return block_; }
    std::int64_t work() const { return work_; }

   private:
    struct Busy {
        Ticks begin;
        Ticks end;
    };

    void set_lengths(const BlockShape& shape);
    bool lay_out(const BlockShape& shape);
    bool place(Symbol symbol, Ticks ready);
    bool in_order() const;
    bool within_cap() const;
    Ticks held_at(std::size_t device, Ticks moment) const;
    void repeat();

    const Problem& problem_;
    std::vector<Ticks> length_;  // per symbol
    std::vector<Ticks> hop_;     // per stage
    Block block_;
    Ticks slot_ = 1;
    std::vector<std::vector<Busy>> busy_;  // per device, modulo the period
    std::vector<Symbol> sorted_;
    Order order_;
    std::int64_t work_ = 0;
};

}  // namespace pykern
