#include "plan/reduce.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "plan/check.hpp"
#include "plan/simulate.hpp"

namespace pykern {

namespace {

// When each stage's last gradient is there.
std::vector<double> gradient_ends(const Timeline& timeline, int num_stages) {
    std::vector<double> ends(static_cast<std::size_t>(num_stages), 0);
    for (const auto& row : timeline.rows()) {
        for (const Span& span : row) {
            if (span.action.kind != Kind::B && span.action.kind != Kind::W) continue;
            double& end = ends[span.action.stage];
            end = std::max(end, span.end_ns);
        }
    }
    return ends;
}

struct Reduction {
    double ready;
    Action action;
};

// The reductions of a device's stages that train, in the order in which they can start.
std::vector<Reduction> reductions_of(const std::vector<int>& stages, int first_trained,
                                     const std::vector<double>& gradient_ends) {
    std::vector<Reduction> reductions;
    for (const int stage : stages) {
        if (stage < first_trained) continue;
        reductions.push_back({.ready = gradient_ends[static_cast<std::size_t>(stage)],
                              .action = make_action(Kind::REDUCE, stage, 0)});
    }
    const auto key = [](const Reduction& reduction) {
        return std::pair(reduction.ready, reduction.action.stage);
    };
    std::ranges::sort(reductions, {}, key);
    return reductions;
}

struct RowWithOverlaps {
    Row row;
    Overlaps starts;
};

// The row with each reduction in front of the first action that starts once it is ready.
RowWithOverlaps merged(const std::vector<Span>& spans, const Overlaps& old_starts,
                       const std::vector<Reduction>& reductions) {
    RowWithOverlaps result;
    auto next = reductions.begin();
    bool in_pair = false;
    for (std::size_t position = 0; position < spans.size(); ++position) {
        const double start_ns = spans[position].start_ns;
        for (; !in_pair && next != reductions.end() && next->ready <= start_ns; ++next) {
            result.row.push_back(next->action);
        }
        in_pair = std::ranges::binary_search(old_starts, position);
        if (in_pair) result.starts.push_back(result.row.size());
        result.row.push_back(spans[position].action);
    }
    for (; next != reductions.end(); ++next) result.row.push_back(next->action);
    return result;
}

}  // namespace

Plan with_reductions(const Plan& plan, bool over_peers) {
    check(plan);
    const bool trains = plan.has(Kind::B) || plan.has(Kind::W);
    const bool sums = over_peers || plan.placement().num_replicas() > 1;
    if (!sums || !trains || plan.has(Kind::REDUCE)) return plan;
    const Timeline timeline = simulate(plan, Costs(1.0, 2.0));
    const std::vector<double> ends = gradient_ends(timeline, plan.num_stages());
    const std::vector<std::vector<int>> stages = plan.placement().stages_by_device();
    const int first_trained = plan.first_trained();
    std::vector<Row> rows;
    std::vector<Overlaps> overlaps;
    for (std::size_t device = 0; device < stages.size(); ++device) {
        RowWithOverlaps row = merged(timeline.rows()[device], plan.overlaps()[device],
                                     reductions_of(stages[device], first_trained, ends));
        rows.push_back(std::move(row.row));
        overlaps.push_back(std::move(row.starts));
    }
    return checked({plan.placement(), plan.num_microbatches(), std::move(rows), plan.num_slices(),
                    std::move(overlaps)});
}

}  // namespace pykern
