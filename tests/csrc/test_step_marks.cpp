// How far the streams of a step have come, by a clock of the test's own.
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exec/stall_report.hpp"
#include "exec/step_marks.hpp"
#include "exec/stream_job.hpp"
#include "fake_world.hpp"
#include "plan/generate.hpp"
#include "plan/text.hpp"

using namespace pykern;

namespace {

// A step of one microbatch after another, whose tasks are kernels. Nothing runs by itself.
class StepByHand {
   public:
    explicit StepByHand(int num_devices, std::uint32_t num_microbatches)
        : lanes_(std::make_shared<Lanes>(names(num_devices))),
          job(by_slots(Placement::linear(num_devices), static_cast<int>(num_microbatches), 1, 2),
              lanes_),
          marks(job.take_marks()) {
        fake_allow_undeclared(1);
        fake_set_eagerness(0);
    }
    ~StepByHand() {
        fake_let_go(1);
        fake_run_all();
    }
    StepByHand(const StepByHand&) = delete;
    StepByHand& operator=(const StepByHand&) = delete;

    void begin() const {
        for (int lane = 0; lane < lanes_->size(); ++lane) {
            const cuda::CurrentContext current(lanes_->primary(lane));
            marks->begin(lane);
        }
    }
    // A kernel that no task has issued, and that does not end.
    void hang(int stream) const {
        fake_hang("fake_kernel", 1);
        fake_kernel(job.stream(stream), 1000, nullptr, 0);
    }
    void issue(const char* action, bool hangs = false) const {
        const TaskNumber task = job.task_of(parse_action(action));
        const int stream = job.order().tasks()[task].stream;
        const cuda::CurrentContext current(job.context_of(stream));
        if (hangs) {
            hang(stream);
        } else {
            fake_kernel(job.stream(stream), 1000, nullptr, 0);
        }
        marks->record(task, {});
    }
    std::string current(int stream) const { return text(marks->current(stream)); }
    std::string text(std::optional<TaskNumber> task) const {
        return task ? to_text(job.order().tasks()[*task].action) : "";
    }

   private:
    static std::vector<LaneName> names(int num_devices) {
        std::vector<LaneName> names;
        names.reserve(static_cast<std::size_t>(num_devices));
        for (int gpu = 0; gpu < num_devices; ++gpu) names.push_back({.gpu = gpu});
        return names;
    }

    std::shared_ptr<Lanes> lanes_;
    cuda::CurrentContext of_looks_{lanes_->primary(0)};

   public:
    StreamJob job;
    std::shared_ptr<StepMarks> marks;
};

}  // namespace

TEST_CASE("each task has a time of its own, and so has the thread that issues") {
    const FakeWorld world(1);
    const StepByHand step(1, 1);
    StepMarks& marks = *step.marks;
    step.begin();
    fake_run_all();
    CHECK(!marks.look(1'000, true));
    CHECK(marks.longest_ns(5'000) == 4'000);
    CHECK(step.text(marks.host_task()) == "0F0");
    step.issue("0F0");
    CHECK(!marks.look(10'000, true));
    CHECK(marks.is_at_work(0));
    CHECK(marks.longest_ns(12'000) == 2'000);
    fake_run_all();
    step.issue("0B0");
    CHECK(!marks.look(20'000, true));
    CHECK(step.current(0) == "0B0");
    CHECK(step.text(marks.last_issued(0)) == "0B0");
    CHECK(marks.longest_ns(21'000) == 1'000);
    marks.finish();
    CHECK(!marks.look(30'000, true));
    CHECK(marks.longest_ns(31'000) == 11'000);
    fake_run_all();
    CHECK(marks.look(40'000, true));
    CHECK(step.current(0) == "");
}

TEST_CASE("a stream is at work when all that it waits for is done") {
    const FakeWorld world(2);
    const StepByHand step(2, 1);
    StepMarks& marks = *step.marks;
    step.begin();
    step.issue("0F0");
    step.issue("0COPY_F0");
    fake_run_all();
    step.issue("1F0", true);
    step.issue("1B0");
    step.issue("1COPY_B0", true);
    step.issue("0B0", true);
    marks.finish();
    fake_run_all();
    // The second sees what the first has found of streams with higher numbers.
    CHECK(!marks.look(5'000, true));
    CHECK(!marks.look(10'000, true));
    CHECK(marks.is_at_work(1));
    CHECK(!marks.is_at_work(0));
    const std::string report = tell_stall(marks, 0, 1'000'010'000);
    CHECK(
        report.starts_with("stage 1, microbatch 0, action 1F0, device 1 has not ended for 1.0 s"));
    const std::size_t at_work = report.find("\"pykern dev1 compute\" is in 1F0 for 1.0 s");
    const std::size_t waits = report.find("\"pykern dev0 compute\" waits for the event behind");
    CHECK(at_work != std::string::npos);
    CHECK(waits != std::string::npos);
    CHECK(at_work < waits);
}

TEST_CASE("work before a step is late for the oldest step alone, where it is") {
    const FakeWorld world(2);
    const StepByHand step(2, 1);
    StepMarks& marks = *step.marks;
    step.hang(1);
    step.begin();
    fake_run_all();
    CHECK(!marks.look(10'000, false));
    CHECK(!marks.is_at_begin());
    CHECK(!marks.look(20'000, true));
    CHECK(marks.is_at_begin());
    CHECK(marks.has_begun(0));
    CHECK(!marks.has_begun(1));
    const std::string report = tell_stall(marks, 0, 1'000'020'000);
    CHECK(report.find("before the step, on device 1 (GPU 1)") != std::string::npos);
    CHECK(!marks.look(30'000, false));
    CHECK(!marks.is_at_begin());
}

TEST_CASE("a step that has failed is over when all that its last task has issued is done") {
    const FakeWorld world(1);
    const StepByHand step(1, 1);
    StepMarks& marks = *step.marks;
    step.begin();
    fake_run_all();
    step.hang(0);
    {
        const cuda::CurrentContext current(step.job.context_of(0));
        marks.cut();
    }
    CHECK(!marks.look(10'000, true));
    CHECK(marks.is_at_tail());
    CHECK(marks.longest_ns(15'000) == 5'000);
    const std::string report = tell_stall(marks, 0, 1'000'010'000);
    CHECK(report.starts_with("what a failed action has issued has not ended for 1.0 s"));
    fake_let_go(1);
    fake_run_all();
    CHECK(marks.look(20'000, true));
}

TEST_CASE("marks of a step under way are for no other") {
    const FakeWorld world(1);
    StepByHand step(1, 1);
    const std::shared_ptr<StepMarks> others = step.job.take_marks();
    CHECK(others != step.marks);
    step.marks->release();
    CHECK(step.job.take_marks() == step.marks);
}
