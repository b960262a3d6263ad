#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fake_world.hpp"
#include "graph_job.hpp"
#include "plans_of_all_forms.hpp"

using namespace pykern;

namespace {

// Forms are all looked at, or one of so many.
#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t kNumRounds = 3;
constexpr std::size_t kEveryForm = 5;
#else
// Rounds of four steps: over all forms and ways to lie on GPUs more than ten thousand orders.
constexpr std::size_t kNumRounds = 54;
constexpr std::size_t kEveryForm = 1;
#endif

using LaneNames = std::vector<LaneName> (*)(int num_devices);

std::vector<LaneName> own_gpus(int num_devices) {
    std::vector<LaneName> names;
    names.reserve(static_cast<std::size_t>(num_devices));
    for (int device = 0; device < num_devices; ++device) names.push_back({.gpu = device});
    return names;
}

std::vector<LaneName> one_gpu(int num_devices) {
    return std::vector<LaneName>(static_cast<std::size_t>(num_devices), LaneName{.gpu = 0});
}

std::vector<LaneName> parts_of_two_gpus(int num_devices) {
    std::vector<LaneName> names;
    names.reserve(static_cast<std::size_t>(num_devices));
    for (int device = 0; device < num_devices; ++device) {
        names.push_back({.gpu = device % 2, .part = device / 2, .num_parts = 2});
    }
    return names;
}

void expect_nothing_broken() {
    for (int i = 0; i < fake_violations(); ++i) FAIL_CHECK(std::string(fake_violation(i)));
    cuda::destroy_idle_streams();
    CHECK(std::string(fake_leaks()) == "");
}

// Steps follow each other without the host's waiting, each with another batch, so that what an
// earlier one has left cannot pass for a result.
void expect_the_same_in_any_order(GraphJob& job) {
    constexpr std::array<double, 3> kEagerness = {0, 0.5, 1};
    std::vector<Results> expected;
    expected.reserve(GraphJob::kNumBatches);
    for (Value batch = 0; batch < GraphJob::kNumBatches; ++batch) {
        expected.push_back(reference(job.order(), batch));
    }
    // The same in every run.
    std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed)
    for (std::size_t round = 0; round < kNumRounds; ++round) {
        CAPTURE(round);
        fake_set_eagerness(kEagerness[round % kEagerness.size()]);
        for (Value batch = 0; batch < GraphJob::kNumBatches; ++batch) {
            job.issue(batch, random() % 4 != 0);
        }
        CHECK(job.results() == expected);
    }
}

void expect_the_same_for_all_forms(LaneNames lane_names, bool peers) {
    std::uint64_t seed = 0;
    for (const NamedPlan& named : plans_of_all_forms()) {
        CAPTURE(named.name);
        reset_world(4, ++seed);
        // Towards higher numbers only, so that each pair needs the host one way.
        for (int device = 0; device < 4 && !peers; ++device) {
            for (int peer = device + 1; peer < 4; ++peer) fake_set_peer(device, peer, 0);
        }
        {
            GraphJob job(named.plan, lane_names(named.plan.num_devices()));
            expect_the_same_in_any_order(job);
        }
        expect_nothing_broken();
    }
}

// Which waits of the second of three steps can be left out, by number, with nothing told.
struct Unnoticed {
    std::string at_start;
    std::string of_tasks;
    std::string at_end;
};

// Says how many waits a step has; the nth of the second step is left out.
int waits_without(int nth, GraphJob& job) {
    job.issue(0, true);
    const std::uint64_t before = fake_calls("cuStreamWaitEvent");
    fake_drop_wait(nth);
    job.issue(1, true);
    const std::uint64_t after = fake_calls("cuStreamWaitEvent");
    if (fake_violations() == 0) job.issue(2, true);
    job.results();
    return static_cast<int>(after - before);
}

// The host waits for all work so far: later work is ordered behind it, and races with none of it.
void begin_anew(const GraphJob& job) {
    for (const auto& [gpu, primary] : job.job().lanes().primaries()) {
        const cuda::CurrentContext current(primary.get());
        cuda::driver::cuCtxSynchronize();
    }
    fake_forgive();
}

Unnoticed unnoticed_in(const Plan& plan, LaneNames lane_names, bool peers) {
    reset_world(4, 1);
    if (!peers) fake_set_peer(0, 1, 0);
    // Races show when work is issued, by its order: no work has to run before the host waits.
    fake_set_eagerness(0);
    GraphJob job(plan, lane_names(plan.num_devices()));
    const auto num_copy_streams = static_cast<int>(job.order().copy_streams().size());
    const int start = plan.num_devices() + 2 * num_copy_streams;
    Unnoticed unnoticed;
    int num_waits = 1;
    for (int nth = 1; nth <= num_waits; ++nth) {
        num_waits = waits_without(nth, job);
        const bool noticed = fake_violations() > 0;
        begin_anew(job);
        if (noticed) continue;
        const int end = num_waits - num_copy_streams - plan.num_devices();
        std::string& behind_start = nth <= end ? unnoticed.of_tasks : unnoticed.at_end;
        std::string& part = nth <= start ? unnoticed.at_start : behind_start;
        part += std::to_string(nth <= start ? nth : nth - end) + " ";
    }
    return unnoticed;
}

}  // namespace

TEST_CASE("no wait of a task can be left out unnoticed") {
    const std::vector<NamedPlan> forms = plans_of_all_forms();
    for (std::size_t form = 0; form < forms.size(); form += kEveryForm) {
        const NamedPlan& named = forms[form];
        // Copies of a reduction's client wait for all that the reduction waits for.
        if (named.plan.has(Kind::REDUCE)) continue;
        CAPTURE(named.name);
        CHECK(unnoticed_in(named.plan, own_gpus, true).of_tasks == "");
        CHECK(unnoticed_in(named.plan, own_gpus, false).of_tasks == "");
        CHECK(unnoticed_in(named.plan, one_gpu, true).of_tasks == "");
    }
}

TEST_CASE("waits at the start and the end of a step can be left out where others imply them") {
    // At the start three lanes wait, then the copies 0 to 1 and 1 to 2, 1 to 0 and 2 to 1, each for
    // its sender and its receiver; at the end lanes wait for these copies, then callers for lanes.
    const Plan plan = by_slots(Placement::linear(3), 5, 1, 2);
    const Unnoticed unnoticed = unnoticed_in(plan, own_gpus, true);
    // A copy begins with its sender, and gradients come when both ends have begun; activations have
    // all arrived before the last gradients leave.
    CHECK(unnoticed.at_start == "4 6 8 9 10 11 ");
    CHECK(unnoticed.at_end == "1 2 ");
    const Unnoticed forward = unnoticed_in(plan.forward_only(), own_gpus, true);
    CHECK(forward.at_start == "4 6 ");
    CHECK(forward.at_end == "");
}

TEST_CASE("graphs give in any order what actions one by one give: a GPU for each device") {
    expect_the_same_for_all_forms(own_gpus, true);
}

TEST_CASE("graphs give in any order what actions one by one give: all devices on one GPU") {
    expect_the_same_for_all_forms(one_gpu, true);
}

TEST_CASE("graphs give in any order what actions one by one give: parts of two GPUs") {
    expect_the_same_for_all_forms(parts_of_two_gpus, true);
}

TEST_CASE("graphs give in any order what actions one by one give: no peers one way") {
    expect_the_same_for_all_forms(own_gpus, false);
}
