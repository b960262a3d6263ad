#include "search/site.hpp"

#include <utility>

#include "search/bound.hpp"
#include "search/extend.hpp"
#include "search/fuse.hpp"

namespace pykern {

namespace {

// Warm-up, steady part and cool-down all show in four microbatches per device; below six it is not
// worth to search fewer than all.
constexpr std::size_t kFewPerDevice = 4;
constexpr std::size_t kManyPerDevice = 6;

// Where forwards come first, nothing repeats: there are two ramps, and no steady part of both.
bool is_many(const Problem& problem) {
    if (problem.forwards_first) return false;
    return problem.num_microbatches > kManyPerDevice * problem.num_devices;
}

// The same with few microbatches: their number less a multiple of the devices, so that periods of
// that many can be repeated.
Problem with_few(Problem problem) {
    if (!is_many(problem)) return problem;
    const std::size_t rest = problem.num_microbatches % problem.num_devices;
    problem.num_microbatches = kFewPerDevice * problem.num_devices + rest;
    return problem;
}

Ticks average_time(const Problem& problem) {
    Ticks sum = 0;
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        sum += problem.work(device);
    }
    return sum / static_cast<Ticks>(3 * problem.num_stages);
}

}  // namespace

Bench::Bench(Problem of)
    : problem(std::move(of)),
      devices(problem),
      guided(devices),
      planner(problem),
      schedule(problem) {}

Site::Site(const Problem& problem, const Poll& poll)
    : poll_(poll), few_(with_few(problem)), bound_ns_(problem.to_ns(lower_bound(problem))) {
    if (is_many(problem)) full_ = std::make_unique<Bench>(problem);
}

bool Site::seed(const Order& order) {
    Schedule& schedule = full().schedule;
    if (!schedule.load(order)) return false;
    offer_full(order, problem().to_ns(schedule.makespan()));
    // Where a split is free, what it allows is never worse.
    const Order start = problem().split_has_price() ? order : split_all(order);
    const Order few = repeats() ? truncate(start) : start;
    if (few_.schedule.load(few)) offer(few, few_.schedule.makespan());
    return true;
}

// Without the microbatches beyond the few.
Order Site::truncate(const Order& order) const {
    Order few;
    std::vector<Labelled> row;
    for (std::size_t device = 0; device < order.rows.size(); ++device) {
        label(problem(), device, order.rows[device], row);
        Symbols& symbols = few.rows.emplace_back();
        for (const Labelled& each : row) {
            if (each.microbatch < few_.problem.num_microbatches) symbols.push_back(each.symbol);
        }
    }
    return few;
}

void Site::offer_full(const Order& order, double makespan_ns) {
    if (makespan_ns >= makespan_ns_) return;
    makespan_ns_ = makespan_ns;
    order_ = order;
}

// Takes an order of few microbatches if it promises more than the best one.
void Site::offer(const Order& order, Ticks makespan) {
    if (few_.problem.to_ns(makespan) >= promise_ns_) return;
    Ticks promise = makespan;
    if (repeats()) {
        if (!few_.schedule.load(order)) return;
        const std::size_t extra = full_->problem.num_microbatches - few_.problem.num_microbatches;
        promise += static_cast<Ticks>(extra) * few_.schedule.pace();
    }
    const double promise_ns = few_.problem.to_ns(promise);
    if (promise_ns >= promise_ns_) return;
    promise_ns_ = promise_ns;
    few_order_ = order;
    if (!repeats()) offer_full(order, promise_ns);
}

void Site::try_rules(const GreedyRules& rules) {
    if (const std::optional<Order> order = Greedy(few_.devices, rules).run()) {
        offer(*order, few_.devices.makespan());
    }
}

// The makespan of a block's plan as dispatched.
std::optional<Ticks> Site::try_plan(const Order* plan) {
    poll_();
    if (plan == nullptr) return std::nullopt;
    const std::optional<Order> order = few_.guided.run(*plan);
    if (!order) return std::nullopt;
    const Ticks makespan = few_.devices.makespan();
    offer(*order, makespan);
    if (makespan < block_makespan_) {
        block_makespan_ = makespan;
        block_ = few_.planner.block();
    }
    return makespan;
}

void Site::try_blocks(Random& random, std::int64_t work) {
    if (problem().forwards_first) return;  // as a block has both
    const std::int64_t end = few_.work() + work;
    const Ticks heat = average_time(few_.problem) / 2;
    while (few_.work() < end && promise_ns_ > bound_ns_) {
        const BlockShape shape = shape_ && random.chance(85) ? changed_shape(*shape_, random)
                                                             : random_shape(problem(), random);
        const std::optional<Ticks> makespan = try_plan(few_.planner.plan(shape));
        // Sometimes a worse one, to walk out of a valley.
        if (!makespan || (shape_ && *makespan > shape_makespan_ + random.exponential(heat))) {
            continue;
        }
        shape_ = shape;
        shape_makespan_ = *makespan;
    }
}

void Site::try_shifts(Random& random, std::int64_t work) {
    if (!block_) return;
    const std::int64_t begin = few_.work();
    Block block = *block_;
    Ticks current = block_makespan_;
    const Ticks hottest = average_time(few_.problem) / 2;
    while (few_.work() < begin + work && promise_ns_ > bound_ns_) {
        const std::int64_t left = begin + work - few_.work();
        const Block next = changed_block(block, random);
        const std::optional<Ticks> makespan = try_plan(few_.planner.plan(next));
        const Ticks heat = hottest * (1024 * left / work) / 1024;
        if (!makespan || *makespan > current + random.exponential(heat)) continue;
        block = next;
        current = *makespan;
    }
}

void Site::try_annealing(Random& random, std::int64_t work, int heat) {
    if (!few_.schedule.load(few_order_)) return;
    const Ticks hottest = average_time(few_.problem) * heat / 100;
    const Ticks target = repeats() ? 0 : lower_bound(few_.problem);
    Ticks makespan = 0;
    const Order order = anneal(few_.schedule, random, {hottest, work, target}, poll_, makespan);
    offer(order, makespan);
}

void Site::extend() {
    if (!repeats() || few_order_.rows.empty()) return;
    if (!few_.schedule.load(few_order_)) return;
    extend_loaded();
    if (block_) {
        const Order* plan = full_->planner.plan(*block_);
        const std::optional<Order> order =
            plan == nullptr ? std::nullopt : full_->guided.run(*plan);
        if (order) offer_full(*order, problem().to_ns(full_->devices.makespan()));
    }
    if (!order_.rows.empty()) return;
    const std::optional<Order> order = Greedy(full_->devices, greedy_sweep(false)[0]).run();
    if (order) offer_full(*order, problem().to_ns(full_->devices.makespan()));
}

void Site::extend_loaded() {
    const std::size_t extra = full_->problem.num_microbatches - few_.problem.num_microbatches;
    const Ticks makespan = few_.schedule.makespan();
    for (const std::size_t period : {std::size_t{1}, few_.problem.num_devices}) {
        for (const int eighth : {2, 3, 4, 5}) {
            const Order order = pykern::extend(few_.schedule, extra, period, makespan * eighth / 8);
            if (order.rows.empty() || !full_->schedule.load(order)) continue;
            offer_full(order, problem().to_ns(full_->schedule.makespan()));
        }
    }
}

void Site::polish(Random& random, std::int64_t work) {
    const Order start = problem().split_has_price() ? order_ : split_all(order_);
    if (!full().schedule.load(start)) return;
    const Ticks hottest = average_time(problem()) / 10;
    Ticks makespan = 0;
    const Order order =
        anneal(full().schedule, random, {hottest, work, lower_bound(problem())}, poll_, makespan);
    offer_full(order, problem().to_ns(makespan));
}

void Site::fuse(std::int64_t work) {
    if (!full().schedule.load(merge_unknown(problem(), order_))) return;
    fuse_all(full().schedule, work);
    order_ = full().schedule.order();
    makespan_ns_ = problem().to_ns(full().schedule.makespan());
}

}  // namespace pykern
