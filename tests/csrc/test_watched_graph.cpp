#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exec/step_graph.hpp"
#include "exec/stream_watch.hpp"
#include "fake_world.hpp"
#include "mix_step.hpp"
#include "plan/generate.hpp"
#include "watching.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

Plan one_f_one_b() { return by_slots(Placement::linear(3), 5, 1, 2); }

// A step as one graph, on three GPUs.
struct Whole {
    Whole() : step((fake_allow_undeclared(1), one_f_one_b()), {0, 1, 2}), graph(step.job, true) {}

    void run(StreamWatch& watch) {
        fake_begin_step();
        graph.run(step.given_callers, &watch);
    }
    // The number of a task's first node among those that do work.
    int node_of(TaskNumber task) const {
        std::size_t number = 1;
        for (TaskNumber before = 0; before < task; ++before) {
            number += step.job.transfers(before).size();
            if (const auto& launch = step.job.launch(before)) {
                number += launch->before.size() + launch->after.size() + 1;
            }
        }
        return static_cast<int>(number);
    }

    MixStep step;
    StepGraph graph;
};

void wait_for_report(StreamWatch& watch) {
    const auto begin = std::chrono::steady_clock::now();
    while (watch.report().empty() && std::chrono::steady_clock::now() - begin < 60s) {
        std::this_thread::sleep_for(5ms);
    }
    CHECK(std::chrono::steady_clock::now() - begin < kPatience + 1s);
}

}  // namespace

TEST_CASE("each task that hangs in a graph of a whole step is named, and who waits for it") {
    const std::size_t num_tasks = StreamOrder(lower(one_f_one_b())).tasks().size();
    for (TaskNumber task = 0; task < num_tasks; task += 7) {
        CAPTURE(task);
        const FakeWorld world(3);
        const Sink sink;
        {
            Whole whole;
            StreamWatch watch(kPatience, sink.file());
            whole.run(watch);
            CHECK(watch.settle(never));
            fake_hang_node(whole.node_of(task));
            whole.run(watch);
            // The step behind takes marks of its own.
            whole.run(watch);
            wait_for_report(watch);
            const StreamOrder& order = whole.step.job.order();
            CHECK(watch.report().starts_with(first_line(order, task)));
            const bool is_action = order.is_compute(order.tasks()[task]);
            const std::string what = is_action ? ": a CUDA graph " : ": a copy of 16 bytes was ";
            CHECK(watch.report().find(what) != std::string::npos);
            CHECK(watch.report().ends_with(
                "issued all of the step, as one CUDA graph, and 1 behind it"));
            CHECK_THROWS_AS(whole.run(watch), StreamsStalled);
            fake_let_go(1);
            fake_run_all();
        }
        CHECK(sink.text().starts_with("pykern: "));
    }
}

TEST_CASE("a graph that hangs before its first task, and a caller that is late, are named") {
    for (const bool is_caller : {false, true}) {
        CAPTURE(is_caller);
        const FakeWorld world(3);
        const Sink sink;
        Whole whole;
        StreamWatch watch(kPatience, sink.file());
        if (is_caller) {
            fake_hang("fake_kernel", 1);
            fake_kernel(whole.step.callers.at(1), 1000, nullptr, 0);
        } else {
            fake_hang("cuGraphLaunch", 1);
        }
        whole.run(watch);
        wait_for_report(watch);
        if (is_caller) {
            CHECK(watch.report().starts_with("work before the step has not ended for 0."));
            CHECK(watch.report().find("before the step, on device 1 (GPU 1)") != std::string::npos);
        } else {
            CHECK(watch.report().starts_with(first_line(whole.step.job.order(), 0)));
        }
        fake_let_go(1);
        fake_run_all();
    }
}

TEST_CASE("a watched graph gives the same bytes, and its marks are used again") {
    std::vector<MixStep::Bytes> bytes;
    for (const bool is_watched : {false, true}) {
        const FakeWorld world(3);
        const Sink sink;
        fake_allow_undeclared(1);
        {
            MixStep step(one_f_one_b(), {0, 1, 2});
            StreamWatch watch(1h, sink.file());
            StepGraph graph(step.job, is_watched);
            const std::size_t num_tasks = step.job.order().tasks().size();
            CHECK(fake_calls("cuGraphAddEventRecordNode") == (is_watched ? num_tasks : 0));
            const auto run = [&] {
                fake_begin_step();
                step.touch_inputs_and_results();
                graph.run(step.given_callers, is_watched ? &watch : nullptr);
            };
            for (int step_number = 0; step_number < 5; ++step_number) {
                run();
                CHECK(watch.settle(never));
            }
            CHECK(fake_calls("cuGraphExecEventRecordNodeSetEvent") == 0);
            fake_set_eagerness(0);
            run();
            run();
            CHECK(fake_calls("cuGraphExecEventRecordNodeSetEvent") == (is_watched ? num_tasks : 0));
            CHECK(watch.settle([] { return fake_run_all(), false; }));
            bytes.push_back(step.bytes());
        }
        CHECK(sink.text().empty());
    }
    CHECK(bytes[0] == bytes[1]);
}

TEST_CASE("a graph ends when its step is over, also where nobody watches any more") {
    const FakeWorld world(3);
    const Sink sink;
    Whole whole;
    {
        StreamWatch watch(1h, sink.file());
        whole.run(watch);
    }
    CHECK(sink.text().empty());
}

TEST_CASE("nobody waits for a step that stalls, nor for one that begins meanwhile") {
    reset_world(3, 0);
    const Sink sink;
    {
        fake_allow_undeclared(1);
        MixStep step(one_f_one_b(), {0, 1, 2});
        StreamWatch watch(kPatience, sink.file());
        {
            StepGraph graph(step.job, true);
            fake_hang_node(1);
            fake_begin_step();
            graph.run(step.given_callers, &watch);
            wait_for_report(watch);
            const std::shared_ptr<StepMarks> later = step.job.take_marks();
            watch.add(later);
            CHECK(!later->settle());
        }
        fake_let_go(1);
        fake_run_all();
    }
    CHECK(fake_violations() == 0);
    cuda::destroy_idle_streams();
    // A graph that runs must not be destroyed: the driver keeps that one.
    const std::string leaks = fake_leaks();
    CHECK(leaks.starts_with("executable graph of "));
    CHECK(std::ranges::count(leaks, '\n') == 1);
}

TEST_CASE("what the driver refuses of a watched graph is thrown, and the next step is right") {
    for (const std::string function :
         {"cuGraphAddEventRecordNode", "cuGraphExecEventRecordNodeSetEvent", "cuGraphLaunch",
          "cuEventRecord", "cuStreamWaitEvent"}) {
        CAPTURE(function);
        const FakeWorld world(3);
        const Sink sink;
        {
            StreamWatch watch(10s, sink.file());
            fake_allow_undeclared(1);
            MixStep step(one_f_one_b(), {0, 1, 2});
            const auto run = [&] {
                StepGraph graph(step.job, true);
                // The first step is under way when the second begins.
                fake_set_eagerness(0.02);
                for (int step_number = 0; step_number < 2; ++step_number) {
                    fake_begin_step();
                    graph.run(step.given_callers, &watch);
                }
                fake_run_all();
            };
            run();
            fake_fail(function.c_str(), 2, cuda::kOutOfMemory, 0);
            CHECK_THROWS_WITH_AS(run(), doctest::Contains(function.c_str()), cuda::CudaError);
            run();
            CHECK(watch.settle(never));
        }
        CHECK(sink.text().empty());
    }
}
