// Site: one candidate while it is searched, with the best order found for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "search/anneal.hpp"
#include "search/block.hpp"
#include "search/devices.hpp"
#include "search/greedy.hpp"
#include "search/guided.hpp"
#include "search/schedule.hpp"

namespace pykern {

// Tools for one problem, made once so that nothing is allocated while it runs.
struct Bench {
    explicit Bench(Problem of);
    Bench(const Bench&) = delete;

    std::int64_t work() const { return devices.work() + planner.work() + schedule.work(); }

    const Problem problem;
    Devices devices;
    Guided guided;
    BlockPlanner planner;
    Schedule schedule;
};

// Many microbatches are searched as a few, and the steady part of what is found is repeated.
class Site {
   public:
    Site(const Problem& problem, const Poll& poll);

    const Problem& problem() const { return repeats() ? full_->problem : few_.problem; }
    double bound_ns() const { return bound_ns_; }
    // Time of all microbatches; infinite until there is an order.
    double makespan_ns() const { return makespan_ns_; }
    const Order& order() const { return order_; }
    // The time of all microbatches that the best order of few of them promises.
    double promise_ns() const { return promise_ns_; }
    std::int64_t work() const { return few_.work() + (repeats() ? full_->work() : 0); }

    // False where it cannot run or breaks the cap.
    bool seed(const Order& order);
    void try_rules(const GreedyRules& rules);
    void try_blocks(Random& random, std::int64_t work);
    // Moves parts of the best block.
    void try_shifts(Random& random, std::int64_t work);
    // `heat` in percent of an average action.
    void try_annealing(Random& random, std::int64_t work, int heat);
    // Makes an order of all microbatches of the best order of few.
    void extend();
    // Anneals the order of all microbatches.
    void polish(Random& random, std::int64_t work);
    // Undoes splits of the backward that gain nothing, and all whose times are not known.
    void fuse(std::int64_t work);

   private:
    bool repeats() const { return full_ != nullptr; }
    void offer(const Order& order, Ticks makespan);
    void offer_full(const Order& order, double makespan_ns);
    void extend_loaded();
    std::optional<Ticks> try_plan(const Order* plan);
    Order truncate(const Order& order) const;
    Bench& full() { return repeats() ? *full_ : few_; }

    const Poll& poll_;
    Bench few_;
    std::unique_ptr<Bench> full_;  // where there are many
    double bound_ns_;
    Order few_order_;
    double promise_ns_ = std::numeric_limits<double>::infinity();
    Order order_;
    double makespan_ns_ = std::numeric_limits<double>::infinity();
    std::optional<BlockShape> shape_;  // where the walk over shapes is
    Ticks shape_makespan_ = kNever;
    std::optional<Block> block_;  // the best one
    Ticks block_makespan_ = kNever;
};

}  // namespace pykern
