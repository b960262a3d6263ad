#include <doctest/doctest.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exec/stream_watch.hpp"
#include "exec/streams.hpp"
#include "fake_world.hpp"
#include "plans_of_all_forms.hpp"
#include "watching.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

// Each action is a kernel, and each copy moves eight bytes.
class Kernels final : private StreamClient {
   public:
    explicit Kernels(const Plan& plan)
        : lanes_(std::make_shared<Lanes>(names(plan.num_devices()))), job(plan, lanes_) {
        fake_allow_undeclared(1);
        to_.resize(job.order().tasks().size());
        for (const auto& [gpu, primary] : lanes_->primaries()) {
            streams_.push_back(cuda::make_stream(primary.get()));
            callers_[gpu] = streams_.back().get();
        }
    }
    ~Kernels() override {
        fake_let_go(1);
        fake_run_all();
    }
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    void issue(StreamWatch& watch) {
        fake_begin_step();
        Dispatch(job, callers_, *this, false, nullptr, &watch).run();
    }

    // The number of a task among the kernels, or among the copies, of a step.
    int rank(TaskNumber number) const {
        const StreamOrder& order = job.order();
        const bool is_compute = order.is_compute(order.tasks()[number]);
        int rank = 1;
        for (TaskNumber before = 0; before < number; ++before) {
            rank += order.is_compute(order.tasks()[before]) == is_compute ? 1 : 0;
        }
        return rank;
    }
    void hang(TaskNumber number) const {
        const bool is_compute = job.order().is_compute(job.order().tasks()[number]);
        fake_hang(is_compute ? "fake_kernel" : "cuMemcpyAsync", rank(number));
    }

   private:
    static std::vector<LaneName> names(int num_devices) {
        std::vector<LaneName> names;
        names.reserve(static_cast<std::size_t>(num_devices));
        for (int gpu = 0; gpu < num_devices; ++gpu) names.push_back({.gpu = gpu});
        return names;
    }

    bool run(TaskNumber number, Transfers& transfers) noexcept override {
        fake_kernel(job.stream(job.order().tasks()[number].stream), 1000, nullptr, 0);
        const auto from = std::bit_cast<cuda::CUdeviceptr>(&from_);
        transfers = {
            {.to = std::bit_cast<cuda::CUdeviceptr>(&to_[number]), .from = from, .bytes = 8}};
        return true;
    }

    std::shared_ptr<Lanes> lanes_;
    std::vector<cuda::Stream> streams_;
    std::map<int, cuda::CUstream> callers_;
    std::uint64_t from_ = 0;
    std::vector<std::uint64_t> to_;  // by task

   public:
    StreamJob job;
};

// A kernel, or a copy, in the middle of a step.
TaskNumber middle(const StreamOrder& order, bool is_compute) {
    for (auto number = static_cast<TaskNumber>(order.tasks().size() / 2);
         number < order.tasks().size(); ++number) {
        if (order.is_compute(order.tasks()[number]) == is_compute) return number;
    }
    return 0;
}

}  // namespace

TEST_CASE("work that hangs is named, of every form of plan, in time") {
    bool is_compute = false;
    for (const NamedPlan& named : plans_of_all_forms()) {
        // Copies of reductions are the client's own.
        if (named.plan.has(Kind::REDUCE)) continue;
        CAPTURE(named.name);
        is_compute = !is_compute;
        const FakeWorld world(8);
        const Sink sink;
        Kernels job(named.plan);
        const TaskNumber hangs = middle(job.job.order(), is_compute);
        {
            StreamWatch watch(kPatience, sink.file());
            job.issue(watch);
            CHECK(watch.settle(never));
            job.hang(hangs);
            const auto begin = std::chrono::steady_clock::now();
            job.issue(watch);
            job.issue(watch);
            while (watch.report().empty() && std::chrono::steady_clock::now() - begin < 60s) {
                std::this_thread::sleep_for(5ms);
            }
            CHECK(std::chrono::steady_clock::now() - begin < kPatience + 1s);
            CHECK(!watch.settle(never));
            CHECK_THROWS_AS(watch.require_progress(), StreamsStalled);
            CHECK(watch.report().starts_with(first_line(job.job.order(), hangs)));
            // The step behind has recorded no event that the watch takes for one of this step.
            CHECK(watch.report().ends_with("issued all of the step, and 1 behind it"));
        }
        CHECK(sink.text().starts_with("pykern: " + first_line(job.job.order(), hangs)));
    }
}

TEST_CASE("steps that end are not told of, and their marks are used again") {
    const FakeWorld world(8);
    const Sink sink;
    {
        Kernels job(by_slots(Placement::linear(3), 5, 1, 2));
        StreamWatch watch(kPatience, sink.file());
        for (int step = 0; step < 3; ++step) {
            job.issue(watch);
            CHECK(watch.settle(never));
        }
        const std::uint64_t events = fake_calls("cuEventCreate");
        for (int step = 0; step < 20; ++step) {
            job.issue(watch);
            CHECK(watch.settle(never));
        }
        CHECK(fake_calls("cuEventCreate") == events);
        CHECK(watch.report() == "");
        // It looks at nothing when nothing is under way.
        const std::uint64_t queries = fake_calls("cuEventQuery");
        std::this_thread::sleep_for(2 * kPatience);
        CHECK(fake_calls("cuEventQuery") == queries);
    }
    CHECK(sink.text() == "");
}

TEST_CASE("work that goes on within the patience is not told of") {
    const FakeWorld world(8);
    const Sink sink;
    {
        Kernels job(by_slots(Placement::linear(3), 5, 1, 2));
        StreamWatch watch(1h, sink.file());
        job.hang(4);
        job.issue(watch);
        int looks = 0;
        CHECK(watch.settle([&] { return ++looks == 5; }));
        CHECK(looks == 5);
        fake_let_go(1);
        CHECK(watch.settle(never));
        job.hang(4);
        job.issue(watch);
    }
    CHECK(sink.text() == "");
}

TEST_CASE("marks outlive their job, and looks leave captures of other threads alone") {
    const FakeWorld world(8);
    const Sink sink;
    StreamWatch watch(1h, sink.file());
    {
        Kernels job(by_slots(Placement::linear(3), 5, 1, 2));
        job.hang(4);
        job.issue(watch);
        fake_set_capturing(1);
        int looks = 0;
        CHECK(watch.settle([&] { return ++looks == 5; }));
    }
    CHECK(watch.settle(never));
    fake_set_capturing(0);
}
