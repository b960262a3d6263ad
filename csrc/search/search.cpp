#include "search/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "plan/check.hpp"
#include "plan/memory.hpp"
#include "plan/require.hpp"
#include "plan/simulate.hpp"
#include "search/site.hpp"

namespace pykern {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// The sites of all candidates that fit, and how the budget is shared out among them.
class Searcher {
   public:
    Searcher(const std::vector<Candidate>& candidates, int num_microbatches,
             const std::vector<double>& caps, std::int64_t budget, std::uint64_t random_seed,
             const Poll& poll)
        : budget_(budget), random_(random_seed) {
        for (const Candidate& candidate : candidates) {
            const Problem problem = make_problem(candidate, num_microbatches, caps);
            sites_.push_back(problem.fits() ? std::make_unique<Site>(problem, poll) : nullptr);
            if (problem.fits()) bound_ns_ = std::min(bound_ns_, sites_.back()->bound_ns());
        }
        if (bound_ns_ == kInfinite) {
            throw std::invalid_argument(
                "memory must hold one microbatch of all stages of a device, and all microbatches "
                "where forwards come first, got caps that no candidate fits. Raise memory, or use "
                "more devices");
        }
    }

    // Whether each seed can run under the caps.
    std::vector<bool> take(const std::vector<Seed>& seeds) {
        std::vector<bool> taken;
        for (const Seed& seed : seeds) {
            Site* site = sites_[seed.candidate].get();
            const std::optional<Order> order = order_of(seed.plan);
            taken.push_back(site != nullptr && order && site->seed(*order));
        }
        return taken;
    }

    void run() {
        sweep_rules(share(10));
        for (const int count : {8, 4, 2}) {
            each(count, share(7),
                 [this](Site& site, std::int64_t work) { site.try_blocks(random_, work); });
        }
        for (const int count : {6, 3, 1}) {
            each(count, share(8),
                 [this](Site& site, std::int64_t work) { site.try_shifts(random_, work); });
        }
        const std::int64_t rung = share(40) / 4;
        for (const auto& [count, heat] : {std::pair{4, 50}, {2, 70}, {1, 100}, {1, 60}}) {
            each(count, rung, [this, heat](Site& site, std::int64_t work) {
                site.try_annealing(random_, work, heat);
            });
        }
        each(2, 0, [](Site& site, std::int64_t) { site.extend(); });
        finish();
    }

    const Site& best() const { return *sites_[best_index()]; }
    std::size_t best_index() const {
        const auto best = std::ranges::min_element(
            sites_, {}, [](const auto& site) { return site ? site->makespan_ns() : kInfinite; });
        return static_cast<std::size_t>(best - sites_.begin());
    }
    double bound_ns() const { return bound_ns_; }
    std::int64_t work() const {
        std::int64_t work = 0;
        for (const auto& site : sites_) work += site ? site->work() : 0;
        return work;
    }

   private:
    std::int64_t share(int percent) const { return budget_ * percent / 100; }
    bool done() const { return best().makespan_ns() <= bound_ns_; }

    // The most promising sites that could still be better than the best.
    std::vector<Site*> promising(int count) const {
        const double best_ns = best().makespan_ns();
        std::vector<std::pair<double, std::size_t>> ranked;
        for (std::size_t i = 0; i < sites_.size(); ++i) {
            if (sites_[i] == nullptr || sites_[i]->bound_ns() >= best_ns) continue;
            ranked.emplace_back(std::min(sites_[i]->promise_ns(), sites_[i]->makespan_ns()), i);
        }
        std::ranges::sort(ranked);
        std::vector<Site*> sites;
        for (const auto& [promise_ns, i] : ranked) {
            if (sites.size() == static_cast<std::size_t>(count)) break;
            sites.push_back(sites_[i].get());
        }
        return sites;
    }

    template <class Try>
    void each(int count, std::int64_t work, Try attempt) {
        const std::vector<Site*> sites = promising(count);
        for (Site* site : sites) {
            if (done()) return;
            attempt(*site, work / static_cast<std::int64_t>(sites.size()));
        }
    }

    // Every site once, so that there is an order, and then rule by rule while there is budget.
    void sweep_rules(std::int64_t work_for_all) {
        const std::int64_t end = work() + work_for_all;
        bool priced = false;
        for (const auto& site : sites_) priced |= site && site->problem().split_has_price();
        const std::vector<GreedyRules> sweep = greedy_sweep(priced);
        for (std::size_t i = 0; i < sweep.size(); ++i) {
            for (Site* site : promising(static_cast<int>(sites_.size()))) {
                if (done() || (i > 0 && work() >= end)) return;
                site->try_rules(sweep[i]);
            }
        }
    }

    void finish() {
        Site& site = *sites_[best_index()];
        if (!done()) site.polish(random_, std::max<std::int64_t>(0, share(95) - work()));
        site.fuse(std::max(share(5), budget_ - work()));
    }

    const std::int64_t budget_;
    Random random_;
    std::vector<std::unique_ptr<Site>> sites_;
    double bound_ns_ = kInfinite;
};

std::int64_t work_of(double budget_ms) {
    if (!(budget_ms >= 0) || budget_ms > 1e9) {
        throw std::invalid_argument("budget_ms must be 0 to 1e9, got " + std::to_string(budget_ms));
    }
    return static_cast<std::int64_t>(budget_ms * static_cast<double>(kWorkPerMs));
}

void require_seeds(const std::vector<Candidate>& candidates, int num_microbatches,
                   const std::vector<Seed>& seeds) {
    for (const Seed& seed : seeds) {
        require_range("candidate of a seed", static_cast<std::int64_t>(seed.candidate), 0,
                      static_cast<std::int64_t>(candidates.size()) - 1);
        if (!(seed.plan.placement() == candidates[seed.candidate].placement)) {
            throw std::invalid_argument(
                "placement of a seed must be that of its candidate, got another");
        }
        require_range("num_microbatches of a seed", seed.plan.num_microbatches(), num_microbatches,
                      num_microbatches);
        check(seed.plan);
    }
}

std::vector<double> makespans_ns(const std::vector<Candidate>& candidates,
                                 const std::vector<Seed>& seeds, const std::vector<bool>& taken) {
    std::vector<double> makespans;
    for (std::size_t i = 0; i < seeds.size(); ++i) {
        const Costs& costs = candidates[seeds[i].candidate].costs;
        makespans.push_back(taken[i] ? simulate(seeds[i].plan, costs).makespan_ns() : kInfinite);
    }
    return makespans;
}

}  // namespace

SearchResult search(const std::vector<Candidate>& candidates, int num_microbatches,
                    const std::vector<double>& caps, const std::vector<Seed>& seeds,
                    const Effort& effort) {
    const std::int64_t budget = work_of(effort.budget_ms);
    require_seeds(candidates, num_microbatches, seeds);
    Searcher searcher(candidates, num_microbatches, caps, budget, effort.random_seed, effort.poll);
    const std::vector<bool> taken = searcher.take(seeds);
    searcher.run();
    const Candidate& candidate = candidates[searcher.best_index()];
    Plan plan = plan_of(searcher.best().problem(), candidate.placement, searcher.best().order());
    const double makespan_ns = simulate(plan, candidate.costs).makespan_ns();
    const bool proven = searcher.best().makespan_ns() <= searcher.bound_ns();
    std::vector<double> peaks = peak_bytes(plan, candidate.memory);
    return {.plan = std::move(plan),
            .makespan_ns = makespan_ns,
            .bound_ns = proven ? makespan_ns : searcher.bound_ns(),
            .proven = proven,
            .seed_makespans_ns = makespans_ns(candidates, seeds, taken),
            .peaks = std::move(peaks),
            .work = searcher.work()};
}

}  // namespace pykern
