#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "exec/step_graph.hpp"
#include "fake_world.hpp"
#include "mix_step.hpp"
#include "plan/generate.hpp"

using namespace pykern;

namespace {

struct Case {
    const char* name;
    Plan plan;
    std::vector<int> gpus;
    bool reachable = true;
};

Plan chimera() { return by_slots(Placement::bidirectional(3), 6, 1, 2); }

std::vector<Case> cases() {
    const Plan one_f_one_b = by_slots(Placement::linear(3), 5, 1, 2);
    const Plan hanayo = by_slots(Placement::wave(2, 2), 4, 2, 16);
    return {{"1F1B", one_f_one_b, {0, 1, 2}},
            {"1F1B on one GPU", one_f_one_b, {0, 0, 0}},
            {"1F1B by way of the host", one_f_one_b, {0, 1, 2}, false},
            {"Hanayo", hanayo, {0, 1}},
            {"Chimera", chimera(), {0, 1, 2}}};
}

void reset(const Case& given, std::uint64_t seed) {
    reset_world(3, seed);
    fake_allow_undeclared(1);
    for (int device = 0; device < 3 && !given.reachable; ++device) {
        for (int peer = 0; peer < 3; ++peer) fake_set_peer(device, peer, 0);
    }
}

// The bytes after two steps of which every task waits for the one before.
auto expected(const Case& given) {
    reset(given, 0);
    MixStep step(given.plan, given.gpus);
    step.run_in_order();
    step.run_in_order();
    return step.bytes();
}

void run(StepGraph& graph, const MixStep& step) {
    fake_begin_step();
    step.touch_inputs_and_results();
    graph.run(step.given_callers, nullptr);
}

void check_clean() {
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
    cuda::destroy_idle_streams();
    CHECK(std::string(fake_leaks()).empty());
}

}  // namespace

TEST_CASE("a whole step is one launch, and moves the bytes that its tasks would in their order") {
    for (const Case& given : cases()) {
        CAPTURE(given.name);
        const auto bytes = expected(given);
        for (std::uint64_t seed = 0; seed < 10; ++seed) {
            CAPTURE(seed);
            reset(given, seed);
            {
                MixStep step(given.plan, given.gpus);
                StepGraph graph(step.job, false);
                CHECK(fake_calls("cuGraphInstantiateWithFlags") == 1);
                CHECK(fake_calls("cuGraphUpload") == 1);
                const std::uint64_t records = fake_calls("cuEventRecord");
                run(graph, step);
                run(graph, step);
                step.touch_inputs_and_results();
                CHECK(step.bytes() == bytes);
                CHECK(fake_calls("cuGraphLaunch") == 2);
                CHECK(fake_calls("cuMemcpyAsync") == 0);
                // At each caller's start, and at the end.
                CHECK(fake_calls("cuEventRecord") - records == 2 * (step.callers.size() + 1));
            }
            check_clean();
        }
    }
}

TEST_CASE("an action without a launch is named, and nothing is left") {
    const Case given = cases()[0];
    reset(given, 0);
    {
        const Action first{.microbatch = 2, .stage = 1, .kind = Kind::F};
        const Action later{.microbatch = 3, .stage = 2, .kind = Kind::B};
        MixStep step(given.plan, given.gpus, {first, later});
        CHECK_THROWS_WITH_AS(
            StepGraph(step.job, false),
            "all actions must have launches for a graph of a whole step, got none for 1F2",
            std::invalid_argument);
    }
    check_clean();
}

TEST_CASE("a graph is of the launches and transfers that it was made of") {
    const Case given = cases()[0];
    const auto bytes = expected(given);
    reset(given, 0);
    MixStep step(given.plan, given.gpus);
    const Action moved{.microbatch = 0, .stage = 0, .kind = Kind::COPY_F};
    const Action reader{.microbatch = 0, .stage = 1, .kind = Kind::F};
    const TaskNumber copy = step.job.task_of(moved);
    const TaskNumber receiver = step.job.task_of(reader);
    StepGraph first(step.job, false);
    CHECK(first.is_current());
    Launch launch = step.job.launch(receiver).value_or(Launch{});
    REQUIRE(launch.graph != nullptr);
    launch.before = step.job.transfers(copy);
    step.job.set_launch(receiver, launch);
    CHECK(!first.is_current());
    StepGraph second(step.job, false);
    CHECK(second.is_current());
    // A copy that moves nothing passes on what it waits for.
    step.job.set_transfers(copy, {});
    CHECK(!second.is_current());
    StepGraph third(step.job, false);
    run(third, step);
    run(third, step);
    CHECK(step.bytes() == bytes);
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
}

TEST_CASE("copies that move nothing pass on what they wait for, once") {
    const Case given{"Chimera", chimera(), {0, 1, 2}};
    reset(given, 0);
    MixStep step(given.plan, given.gpus);
    const std::vector<Task>& tasks = step.job.order().tasks();
    for (TaskNumber task = 0; task < tasks.size(); ++task) {
        if (!step.job.order().is_compute(tasks[task])) step.job.set_transfers(task, {});
    }
    StepGraph graph(step.job, false);
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
}

TEST_CASE("a reader waits for each part of a transfer by way of the host") {
    const Case given{"apart", by_slots(Placement::linear(2), 1, 1, 2), {0, 1}, false};
    reset(given, 0);
    // In parts of 4, 4 and 1 MiB.
    const std::size_t num_bytes = std::size_t{9} << 20;
    std::vector<std::uint8_t> sent(num_bytes, 7);
    std::vector<std::uint8_t> host(num_bytes);
    std::vector<std::uint8_t> landed(num_bytes);
    std::array<std::uint8_t, 16> result{};
    MixStep step(given.plan, given.gpus);
    const Transfer transfer{.to = address_of(landed),
                            .from = address_of(sent),
                            .bytes = num_bytes,
                            .via = address_of(host)};
    step.job.set_transfers(step.job.task_of({.microbatch = 0, .stage = 0, .kind = Kind::COPY_F}),
                           {transfer});
    const std::array<FakeAccess, 2> accesses{
        {{address_of(landed), num_bytes, 0}, {address_of(result), sizeof result, 1}}};
    Launch launch;
    launch.graph = fake_make_mix_graph(1000, 1, accesses.data(), accesses.size());
    step.job.set_launch(step.job.task_of({.microbatch = 0, .stage = 1, .kind = Kind::F}), launch);
    StepGraph graph(step.job, false);
    run(graph, step);
    fake_run_all();
    CHECK(landed == sent);
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
}

TEST_CASE("copies of more bytes than a pitch may have are several nodes") {
    const Case given{"apart", by_slots(Placement::linear(2), 1, 1, 2), {0, 1}};
    reset(given, 0);
    MixStep step(given.plan, given.gpus);
    const TaskNumber copy = step.job.task_of({.microbatch = 0, .stage = 0, .kind = Kind::COPY_F});
    const std::uint64_t before = fake_calls("cuGraphAddMemcpyNode");
    const StepGraph small(step.job, false);
    const std::uint64_t others = fake_calls("cuGraphAddMemcpyNode") - before - 1;
    // Nothing is moved, since the graph is not launched.
    step.job.set_transfers(copy, {{.to = 16, .from = 32, .bytes = std::size_t{5} << 30}});
    const StepGraph large(step.job, false);
    CHECK(fake_calls("cuGraphAddMemcpyNode") - before - others - 1 == others + 5);
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
}

TEST_CASE("a step that throws has ended") {
    const Case given = cases()[0];
    reset(given, 0);
    fake_set_eagerness(0);
    MixStep step(given.plan, given.gpus);
    const cuda::CUdeviceptr loss = step.at("loss", 0, 2, 4);
    fake_alloc(loss, 16, step.callers.at(2));
    StepGraph graph(step.job, false);
    // The first that comes after the launch.
    fake_fail("cuEventRecord", 4, cuda::kOutOfMemory, 0);
    CHECK_THROWS_AS(graph.run(step.given_callers, nullptr), cuda::CudaError);
    CHECK(fake_calls("cuGraphLaunch") == 1);
    fake_free(loss);
    for (const std::string& text : FakePair::violations()) FAIL_CHECK(text);
}

TEST_CASE("whatever the driver refuses is thrown, and the next step is right") {
    const Case given = cases()[0];
    for (const char* function :
         {"cuGraphCreate", "cuGraphAddChildGraphNode", "cuGraphAddMemcpyNode",
          "cuGraphInstantiateWithFlags", "cuGraphUpload", "cuGraphLaunch", "cuEventRecord",
          "cuStreamWaitEvent"}) {
        for (const int nth : {1, 4, 6}) {
            CAPTURE(function);
            CAPTURE(nth);
            reset(given, 0);
            {
                MixStep step(given.plan, given.gpus);
                const auto make_and_run = [&] {
                    StepGraph graph(step.job, false);
                    run(graph, step);
                };
                const std::uint64_t before = fake_calls(function);
                make_and_run();
                const std::uint64_t calls = fake_calls(function) - before;
                if (calls < static_cast<std::uint64_t>(nth)) continue;
                fake_fail(function, nth, cuda::kOutOfMemory, 0);
                CHECK_THROWS_WITH_AS(make_and_run(), doctest::Contains(function), cuda::CudaError);
                make_and_run();
                step.touch_inputs_and_results();
                fake_run_all();
            }
            check_clean();
        }
    }
}

TEST_CASE("after a lost context a step throws, and its objects can be ended") {
    const Case given = cases()[0];
    reset(given, 0);
    MixStep step(given.plan, given.gpus);
    StepGraph graph(step.job, false);
    fake_fail("cuGraphLaunch", 1, 700, 1);
    CHECK_THROWS_WITH_AS(run(graph, step), doctest::Contains("context is lost"), cuda::CudaError);
}
