#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <stdexcept>
#include <vector>

#include "plan/check.hpp"
#include "plan/simulate.hpp"
#include "plans.hpp"
#include "search/anneal.hpp"
#include "search/block.hpp"
#include "search/bound.hpp"
#include "search/extend.hpp"
#include "search/fuse.hpp"
#include "search/greedy.hpp"
#include "search/guided.hpp"
#include "search/search.hpp"

using namespace pykern;

namespace {

// Unequal stages, latency, and a split that costs a little.
Candidate uneven() {
    const StageValues forward = std::vector<double>{3, 1, 2, 2, 1, 4};
    const StageValues input = std::vector<double>{2, 1, 3, 2, 1, 2};
    const StageValues weight = std::vector<double>{2, 1, 1, 2, 1, 3};
    const StageValues backward = std::vector<double>{3.5, 2, 3.5, 4, 1.5, 5};
    return {Placement(3, {0, 1, 2, 2, 1, 0}), Costs(forward, backward, 0.25, input, weight),
            Memory(1.0, 0.5)};
}

Candidate even(const Placement& placement) {
    return {placement, Costs(1.0, 2.0), Memory(1.0, 1.0)};
}

Order greedy_order(const Problem& problem, const GreedyRules& rules) {
    Devices devices(problem);
    const std::optional<Order> order = Greedy(devices, rules).run();
    return order.value_or(Order{});
}

}  // namespace

TEST_CASE("numbers are the same on every machine and stay in range") {
    Random random(7);
    CHECK(random.next() == 7191089600892374487U);
    std::set<std::size_t> seen;
    double sum = 0;
    for (int i = 0; i < 10'000; ++i) {
        seen.insert(random.below(5));
        sum += static_cast<double>(random.exponential(1 << 20));
    }
    CHECK(seen == std::set<std::size_t>{0, 1, 2, 3, 4});
    CHECK(sum / 10'000 / (1 << 20) == doctest::Approx(1).epsilon(0.1));
}

TEST_CASE("a loaded order takes what the simulator says") {
    const Candidate candidate = uneven();
    const Problem problem = make_problem(candidate, 4, {5, 5, 5});
    Schedule schedule(problem);
    for (const GreedyRules& rules : greedy_sweep(true)) {
        const Order order = greedy_order(problem, rules);
        REQUIRE(schedule.load(order));
        const Plan plan = plan_of(problem, candidate.placement, order);
        const Timeline timeline = simulate(plan, candidate.costs);
        CHECK(problem.to_ns(schedule.makespan()) == timeline.makespan_ns());
        CHECK(order_of(plan) == order);
        const std::vector<double> peaks = peak_bytes(plan, candidate.memory);
        CHECK(*std::ranges::max_element(peaks) <= 5);
    }
}

TEST_CASE("orders that cannot run or break the cap are refused") {
    const Problem problem = make_problem(even(Placement::linear(2)), 2, {2, 2});
    Schedule schedule(problem);
    const auto load = [&](const std::vector<std::string>& rows) {
        return schedule.load(order_of(plan_of(Placement::linear(2), 2, rows)).value());
    };
    CHECK(load({"0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1"}));
    CHECK_FALSE(load({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"}));
    CHECK_FALSE(load({"0F0 0F1 0B0", "1F0 1B0 1F1 1B1"}));
    CHECK_FALSE(load({"0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"}));
    CHECK_FALSE(load({"0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"}));
    const Problem tight = make_problem(even(Placement::linear(2)), 2, {1, 2});
    CHECK_FALSE(Schedule(tight).load(greedy_order(problem, greedy_sweep(false)[0])));
}

TEST_CASE("what annealing accepts is what a fresh evaluation gives") {
    const Problem problem = make_problem(uneven(), 6, {6, 6, 6});
    const Order start = greedy_order(problem, greedy_sweep(false)[0]);
    Schedule schedule(problem);
    Schedule fresh(problem);
    Random random(1);
    REQUIRE(schedule.load(start));
    const Ticks before = schedule.makespan();
    for (int round = 0; round < 20; ++round) {
        Ticks best = 0;
        const Order order = anneal(schedule, random, {1 << 30, 20'000, 0}, [] {}, best);
        REQUIRE(fresh.load(order));
        CHECK(fresh.makespan() == best);
        REQUIRE(fresh.load(schedule.order()));
        CHECK(fresh.makespan() == schedule.makespan());
        REQUIRE(schedule.load(order));
    }
    CHECK(schedule.makespan() < before);
    CHECK(schedule.makespan() >= lower_bound(problem));
}

TEST_CASE("blocks keep the cap when they are repeated, and dispatch keeps it too") {
    const Problem problem = make_problem(even(Placement::wave(4, 2)), 12, {20, 20, 20, 20});
    Devices devices(problem);
    Guided guided(devices);
    BlockPlanner planner(problem);
    Schedule schedule(problem);
    Random random(3);
    int plans = 0;
    for (int i = 0; i < 300; ++i) {
        const Order* plan = planner.plan(random_shape(problem, random));
        if (plan == nullptr) continue;
        ++plans;
        REQUIRE(schedule.load(*plan));
        const std::optional<Order> order = guided.run(*plan);
        REQUIRE(schedule.load(order.value_or(Order{})));
        CHECK(schedule.makespan() == devices.makespan());
    }
    CHECK(plans > 50);
}

TEST_CASE("a steady part is repeated as often as there are microbatches more") {
    const Candidate candidate = even(Placement::linear(3));
    const Problem few = make_problem(candidate, 12, {3, 3, 3});
    const Problem many = make_problem(candidate, 30, {3, 3, 3});
    Schedule schedule(few);
    REQUIRE(schedule.load(greedy_order(few, greedy_sweep(false)[0])));
    Schedule longer(many);
    Ticks best = kNever;
    for (const std::size_t period : {std::size_t{1}, std::size_t{3}}) {
        for (const Ticks eighth : {2, 3, 4, 5}) {
            const Ticks moment = schedule.makespan() * eighth / 8;
            REQUIRE(longer.load(extend(schedule, 18, period, moment)));
            best = std::min(best, longer.makespan());
        }
    }
    CHECK(best == schedule.makespan() + 18 * schedule.pace());
}

TEST_CASE("splits that win nothing are undone") {
    const Problem problem = make_problem(even(Placement::linear(2)), 4, {2, 2});
    Schedule schedule(problem);
    REQUIRE(schedule.load(greedy_order(problem, greedy_sweep(false)[0])));
    const Ticks before = schedule.makespan();
    const Order split = schedule.order();
    fuse_all(schedule, 1'000'000);
    CHECK(schedule.makespan() == before);
    CHECK(schedule.order().rows[0].size() < split.rows[0].size());
    CHECK(split_all(split_all(schedule.order())) == split_all(schedule.order()));
}

TEST_CASE("a search takes seeds only of its candidates") {
    const Plan plan = plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"});
    const std::vector<Candidate> candidates = {even(Placement::linear(2))};
    const Effort effort{.budget_ms = 1, .random_seed = 0, .poll = [] {}};
    const SearchResult found = search(candidates, 1, {1, 1}, {{0, plan}}, effort);
    CHECK(found.makespan_ns == 5);
    CHECK(found.proven);
    check(found.plan);
    CHECK_THROWS_AS(search(candidates, 1, {1, 1}, {{1, plan}}, effort), std::invalid_argument);
    CHECK_THROWS_AS(search(candidates, 1, {0.5, 1}, {}, effort), std::invalid_argument);
    CHECK_THROWS_AS(search(candidates, 1, {1}, {}, effort), std::invalid_argument);
}
