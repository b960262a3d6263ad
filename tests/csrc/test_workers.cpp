#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "exec/workers.hpp"
#include "plan/generate.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plans.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

bool never_interrupted() { return false; }

// Checks that each action comes after its inputs and alone on its device, and that the calls of a
// worker come in the order that Client promises. An action writes plain memory: if the
// workers did not order it, the thread sanitizer would tell.
class Witness final : public Client {
   public:
    explicit Witness(const Plan& plan)
        : index_(plan),
          program_(plan),
          done_(plan.num_actions(), 0),
          row_(static_cast<std::size_t>(plan.num_devices()), 0),
          inside_(static_cast<std::size_t>(plan.num_devices()), 0) {}

    void begin() {
        std::ranges::fill(done_, 0);
        std::ranges::fill(row_, 0);
        num_run = 0;
    }

    void attach(int /*worker*/) noexcept override { ++num_attached; }
    void detach(int /*worker*/) noexcept override { --num_attached; }
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}

    bool enter(int worker) noexcept override {
        expect(inside_[static_cast<std::size_t>(worker)]++ == 0);
        return !refuse_entry || worker != refused_worker;
    }
    void leave(int worker) noexcept override {
        expect(--inside_[static_cast<std::size_t>(worker)] == 0);
    }

    bool run(int worker, Position position) noexcept override {
        const Action action = program_.action(position);
        expect(inside_[static_cast<std::size_t>(worker)] == 1);
        for_each_input(action, index_, [&](Action, int input) {
            expect(done_[static_cast<std::size_t>(input)] == 1);
        });
        const auto device = static_cast<std::size_t>(program_.device_of(position));
        expect(program_.row_begin(static_cast<int>(device)) + row_[device] == position);
        if (sleep_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
        ++row_[device];
        ++num_run;
        if (position == failing) return false;
        done_[position] = 1;
        return true;
    }

    bool all_left() const {
        return std::ranges::all_of(inside_, [](int count) { return count == 0; });
    }

    std::atomic<int> num_run{0};
    std::atomic<int> num_attached{0};
    std::atomic<int> num_broken{0};
    Position failing = static_cast<Position>(-1);
    int sleep_us = 0;
    bool refuse_entry = false;
    int refused_worker = 0;

   private:
    void expect(bool held) {
        if (!held) ++num_broken;
    }

    Index index_;
    Program program_;
    std::vector<int> done_;
    std::vector<Position> row_;
    std::vector<int> inside_;
};

Plan wave(int num_devices) {
    return by_slots(Placement::wave(num_devices, 1), 2 * num_devices + 1, num_devices,
                    4 * num_devices);
}

}  // namespace

TEST_CASE("every action runs once, after its inputs, with any number of workers") {
    for (const int num_devices : {1, 2, 3, 4, 8}) {
        for (const int sleep_us : {0, 200}) {
            CAPTURE(num_devices);
            CAPTURE(sleep_us);
            const Plan plan = wave(num_devices);
            Witness witness(plan);
            witness.sleep_us = sleep_us;
            Workers workers(num_devices, witness);
            WorkerProgram job(plan);
            for (int step = 0; step < (sleep_us == 0 ? 200 : 3); ++step) {
                witness.begin();
                workers.run(job, never_interrupted);
                CHECK(witness.num_run == static_cast<int>(plan.num_actions()));
                CHECK(witness.all_left());
            }
            CHECK(witness.num_broken == 0);
            std::size_t traced = 0;
            const Timeline timeline = job.trace.timeline(job.program, 0);
            for (const auto& row : timeline.rows()) traced += row.size();
            CHECK(traced == plan.num_actions());
        }
    }
}

TEST_CASE("two programs take turns on the same workers") {
    const Plan train = wave(3);
    const Plan predict = train.forward_only();
    Witness witness(train);
    Workers workers(3, witness);
    WorkerProgram train_job(train);
    for (int step = 0; step < 20; ++step) {
        witness.begin();
        workers.run(train_job, never_interrupted);
        CHECK(witness.num_run == static_cast<int>(train.num_actions()));
    }
    CHECK(witness.num_broken == 0);
    Witness other(predict);
    Workers more(5, other);
    WorkerProgram predict_job(predict);
    more.run(predict_job, never_interrupted);
    CHECK(other.num_run == static_cast<int>(predict.num_actions()));
    CHECK(other.num_broken == 0);
}

TEST_CASE("a failure anywhere stops the step, and the next one is whole") {
    const Plan plan = wave(3);
    for (const int sleep_us : {0, 160}) {
        Witness witness(plan);
        Workers workers(3, witness);
        WorkerProgram job(plan);
        // Sleeping teaches the pace that actions are long, so that they move between threads.
        witness.sleep_us = sleep_us;
        workers.run(job, never_interrupted);
        const Position stride = sleep_us == 0 ? 1 : 7;
        for (Position failing = 0; failing < plan.num_actions(); failing += stride) {
            witness.begin();
            witness.failing = failing;
            workers.run(job, never_interrupted);
            CHECK(witness.num_run <= static_cast<int>(plan.num_actions()));
            CHECK(witness.all_left());
            witness.begin();
            witness.failing = static_cast<Position>(-1);
            workers.run(job, never_interrupted);
            CHECK(witness.num_run == static_cast<int>(plan.num_actions()));
        }
        CHECK(witness.num_broken == 0);
    }
}

TEST_CASE("a worker that cannot enter fails the step and still leaves") {
    const Plan plan = wave(2);
    Witness witness(plan);
    Workers workers(2, witness);
    WorkerProgram job(plan);
    witness.refuse_entry = true;
    for (const int worker : {0, 1}) {
        witness.begin();
        witness.refused_worker = worker;
        workers.run(job, never_interrupted);
        CHECK(witness.all_left());
    }
    witness.refuse_entry = false;
    witness.begin();
    workers.run(job, never_interrupted);
    CHECK(witness.num_run == static_cast<int>(plan.num_actions()));
    CHECK(witness.num_broken == 0);
}

TEST_CASE("an interrupt stops the step") {
    const Plan plan = wave(2);
    Witness witness(plan);
    witness.sleep_us = 30'000;
    Workers workers(2, witness);
    WorkerProgram job(plan);
    workers.run(job, [] { return true; });
    CHECK(witness.num_run < static_cast<int>(plan.num_actions()));
    CHECK(witness.all_left());
    CHECK(witness.num_broken == 0);
}

TEST_CASE("closing ends the threads, also in the middle of a step") {
    const Plan plan = wave(2);
    for (const auto wait : {0ms, 1ms, 5ms, 20ms}) {
        Witness witness(plan);
        witness.sleep_us = 1000;
        Workers workers(2, witness);
        WorkerProgram job(plan);
        std::thread stepper([&] {
            while (!workers.closed()) {
                witness.begin();
                workers.run(job, never_interrupted);
            }
        });
        std::this_thread::sleep_for(wait);
        workers.close();
        stepper.join();
        CHECK(witness.num_attached == 0);
        CHECK(witness.all_left());
        CHECK(witness.num_broken == 0);
        workers.close();
        witness.begin();
        workers.run(job, never_interrupted);
        CHECK(witness.num_run == 0);
    }
}

TEST_CASE("the workers know their own threads") {
    const Plan plan = plan_of(Placement::linear(1), 1, {"0F0"});
    class Asker final : public Client {
       public:
        void attach(int /*worker*/) noexcept override {}
        void detach(int /*worker*/) noexcept override {}
        void resume(int /*worker*/) noexcept override {}
        void suspend(int /*worker*/) noexcept override {}
        bool enter(int /*worker*/) noexcept override { return true; }
        void leave(int /*worker*/) noexcept override {}
        bool run(int /*worker*/, Position /*position*/) noexcept override {
            inside = workers->is_worker();
            return true;
        }
        Workers* workers = nullptr;
        bool inside = false;
    } asker;
    Workers workers(1, asker);
    asker.workers = &workers;
    WorkerProgram job(plan);
    workers.run(job, never_interrupted);
    CHECK(asker.inside);
    CHECK_FALSE(workers.is_worker());
}
