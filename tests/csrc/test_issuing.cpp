#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exec/issuing.hpp"
#include "exec/streams.hpp"
#include "exec/workers.hpp"
#include "fake_world.hpp"
#include "graph_job.hpp"
#include "plans_of_all_forms.hpp"

using namespace pykern;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t kEachNthForm = 5;
#else
constexpr std::size_t kEachNthForm = 1;
#endif

// A thread for each lane, which is late at random.
class Threads final : private Client {
   public:
    explicit Threads(const StreamJob& job)
        : program_(job), workers_(job.order().num_devices(), *this) {}

    bool issue(Dispatch& dispatch) {
        dispatch_ = &dispatch;
        failed_ = false;
        return dispatch.run([this] {
            workers_.run(program_.program(), [] { return false; });
            return !failed_;
        });
    }

    // The position of an action or copy among those of its kind that fails, or -1.
    int fails = -1;
    // Called before an action or copy, with the thread's number.
    std::function<void(int worker, const Action& action)> before;
    std::atomic<int> num_elsewhere = 0;  // tasks that another thread than that of the device issued

   private:
    void attach(int /*worker*/) noexcept override {}
    void detach(int /*worker*/) noexcept override {}
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int /*worker*/) noexcept override { return true; }
    void leave(int /*worker*/) noexcept override {}
    // NOLINTNEXTLINE(bugprone-exception-escape): only REQUIRE throws
    bool run(int worker, Position position) noexcept override {
        thread_local std::minstd_rand random(static_cast<unsigned>(worker + 1));
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
        const Program& program = program_.program().program;
        if (before) before(worker, program.action(position));
        if (program.device_of(position) != worker) {
            ++num_elsewhere;
            CHECK_FALSE(program.is_in_row(position));
        }
        if (static_cast<int>(position) == fails) {
            failed_ = true;
            return false;
        }
        cuda::CUcontext current = nullptr;
        return dispatch_->issue(program_.task(position), current);
    }

    IssuingProgram program_;
    Dispatch* dispatch_ = nullptr;
    std::atomic<bool> failed_ = false;
    Workers workers_;  // the last member, since its threads use the others
};

std::vector<LaneName> lanes_on(int num_gpus, int num_devices) {
    std::vector<LaneName> names;
    names.reserve(static_cast<std::size_t>(num_devices));
    for (int device = 0; device < num_devices; ++device)
        names.push_back({.gpu = device % num_gpus});
    return names;
}

void expect_what_one_thread_gives(int num_gpus, bool peers) {
    constexpr std::array<double, 3> kEagerness = {0, 0.5, 1};
    const std::vector<NamedPlan> forms = plans_of_all_forms();
    for (std::size_t form = 0; form < forms.size(); form += kEachNthForm) {
        const NamedPlan& named = forms[form];
        CAPTURE(named.name);
        reset_world(4, form + 1);
        for (int device = 0; device < 4 && !peers; ++device) {
            for (int peer = device + 1; peer < 4; ++peer) fake_set_peer(device, peer, 0);
        }
        {
            GraphJob job(named.plan, lanes_on(num_gpus, named.plan.num_devices()));
            Threads threads(job.job());
            std::vector<Results> expected;
            for (Value batch = 0; batch < GraphJob::kNumBatches; ++batch) {
                fake_set_eagerness(kEagerness[static_cast<std::size_t>(batch) % kEagerness.size()]);
                CHECK(job.issue(batch, batch % 2 == 0,
                                [&](Dispatch& dispatch) { return threads.issue(dispatch); }));
                expected.push_back(reference(job.order(), batch));
            }
            CHECK(job.results() == expected);
        }
        for (int i = 0; i < fake_violations(); ++i) FAIL_CHECK(std::string(fake_violation(i)));
        cuda::destroy_idle_streams();
        CHECK(std::string(fake_leaks()) == "");
    }
}

}  // namespace

TEST_CASE("threads give what one thread gives: a GPU for each device") {
    expect_what_one_thread_gives(4, true);
}

TEST_CASE("threads give what one thread gives: all devices on one GPU") {
    expect_what_one_thread_gives(1, true);
}

TEST_CASE("threads give what one thread gives: no peers one way") {
    expect_what_one_thread_gives(4, false);
}

TEST_CASE("a program that issues has the tasks of a job, each once, lanes first") {
    const FakeWorld world(2);
    const Plan plan = by_slots(Placement::linear(2), 3, 1, 2);
    GraphJob job(plan, lanes_on(2, 2));
    const IssuingProgram issuing(job.job());
    const Program& program = issuing.program().program;
    REQUIRE(program.num_actions() == job.order().tasks().size());
    for (Position position = 0; position < program.num_actions(); ++position) {
        const Task& task = job.order().tasks()[issuing.task(position)];
        CHECK(issuing.position(issuing.task(position)) == position);
        CHECK(program.action(position) == task.action);
        CHECK(program.is_in_row(position) == job.order().is_compute(task));
        CHECK(program.device_of(position) == job.order().device_of_stream(task.stream));
    }
    CHECK(program.held()[static_cast<std::size_t>(Kind::F)]);
    CHECK_FALSE(program.held()[static_cast<std::size_t>(Kind::COPY_F)]);
}

TEST_CASE("a copy that waits for a slot is issued by the thread that frees the slot") {
    const auto action = [](Kind kind, int stage, int microbatch) {
        return make_action(kind, stage, microbatch);
    };
    // The second stage has two slots: the third input takes that of the first one, behind its B.
    Row first;
    Row second;
    for (int microbatch = 0; microbatch < 3; ++microbatch) {
        first.push_back(action(Kind::F, 0, microbatch));
        second.push_back(action(Kind::F, 1, microbatch));
        second.push_back(action(Kind::B, 1, microbatch));
    }
    for (int microbatch = 0; microbatch < 3; ++microbatch) {
        first.push_back(action(Kind::B, 0, microbatch));
    }
    const Plan plan(Placement::linear(2), 3, {first, second});
    // Nobody can wait for the end of the last forward, so that it may come after the slot is free.
    constexpr int kNumTries = 100;
    int thread_of_copy = -1;
    for (int tries = 0; tries < kNumTries && thread_of_copy != 1; ++tries) {
        const FakeWorld world(2);
        GraphJob job(plan, lanes_on(2, 2));
        Threads threads(job.job());
        std::atomic<int> num_forwards = 0;
        threads.before = [&](int worker, const Action& now) {
            if (now == action(Kind::COPY_F, 0, 2)) thread_of_copy = worker;
            // The first device has come to its last forward, whose copy may not leave yet.
            if (now == action(Kind::F, 1, 0)) {
                while (num_forwards < 3) std::this_thread::yield();
            }
            if (now.kind == Kind::F && now.stage == 0) ++num_forwards;
        };
        CHECK(job.issue(0, true, [&](Dispatch& dispatch) { return threads.issue(dispatch); }));
        CHECK(threads.num_elsewhere >= static_cast<int>(thread_of_copy == 1));
        CHECK(job.results() == std::vector<Results>{reference(job.order(), 0)});
    }
    CHECK(thread_of_copy == 1);
}

TEST_CASE("a task that fails ends the step behind what was issued") {
    const FakeWorld world(2);
    const Plan plan = by_slots(Placement::linear(2), 3, 1, 2);
    GraphJob job(plan, lanes_on(2, 2));
    Threads threads(job.job());
    const auto by_threads = [&](Dispatch& dispatch) { return threads.issue(dispatch); };
    for (int fails = 0; fails < static_cast<int>(job.order().tasks().size()); ++fails) {
        threads.fails = fails;
        CHECK_FALSE(job.issue(0, true, by_threads));
        job.results();
    }
    threads.fails = -1;
    CHECK(job.issue(1, true, by_threads));
    CHECK(job.results() == std::vector<Results>{reference(job.order(), 1)});
}
