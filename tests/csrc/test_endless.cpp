#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "exec/workers.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

bool no_interrupt() { return false; }

// Checks that each slot goes through the stages in order, round after round, and that a stage of a
// replica has its slots in order. An action writes plain memory: if the workers did not
// order it, the thread sanitizer would tell.
class Procession final : public Client {
   public:
    Procession(const Placement& placement, int num_slots)
        : program_(Program::endless(placement, num_slots)),
          stage_of_slot_(static_cast<std::size_t>(num_slots), 0),
          round_(stage_of_slot_.size(), 0),
          last_(static_cast<std::size_t>(placement.num_stages() * placement.num_replicas()), -1) {}

    void begin() {
        std::ranges::fill(stage_of_slot_, 0);
        std::ranges::fill(round_, 0);
        std::ranges::fill(last_, -1);
        through_.clear();
        num_run = 0;
    }

    void attach(int /*worker*/) noexcept override {}
    void detach(int /*worker*/) noexcept override {}
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int /*worker*/) noexcept override {
        ++num_inside;
        return true;
    }
    void leave(int /*worker*/) noexcept override { --num_inside; }

    bool run(int /*worker*/, Position position) noexcept override {
        if (num_run++ == failing) return false;
        const Action action = program_.action(position);
        const auto num_slots = static_cast<int>(stage_of_slot_.size());
        int& stage = stage_of_slot_[action.microbatch];
        expect(stage == action.stage);
        const int number =
            round_[action.microbatch] * num_slots + static_cast<int>(action.microbatch);
        int& last = last_[program_.stage_of_replica(position)];
        expect(number > last && number - last <= num_slots);
        last = number;
        if (sleep_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
        if (++stage == program_.num_stages()) {
            stage = 0;
            ++round_[action.microbatch];
            through_one(action.microbatch);
        }
        return true;
    }

    // Feeds so many microbatches, each when its slot is free.
    void feed(Workers& workers, const WorkerProgram& job, int count) {
        const auto num_slots = static_cast<int>(stage_of_slot_.size());
        for (int number = 0; number < count; ++number) {
            wait_for(number - num_slots + 1);
            workers.feed(job, number % num_slots);
        }
        wait_for(count);
    }

    std::atomic<int> num_run{0};
    std::atomic<int> num_inside{0};
    std::atomic<int> num_broken{0};
    int failing = -1;
    int sleep_us = 0;

   private:
    void expect(bool held) {
        if (!held) ++num_broken;
    }

    void through_one(std::uint32_t slot) {
        const std::scoped_lock lock(mutex_);
        through_.resize(stage_of_slot_.size(), 0);
        ++through_[slot];
        changed_.notify_all();
    }

    // Until the first so many are through.
    void wait_for(int count) {
        std::unique_lock lock(mutex_);
        through_.resize(stage_of_slot_.size(), 0);
        const auto num_slots = static_cast<int>(stage_of_slot_.size());
        changed_.wait(lock, [&] {
            for (int slot = 0; slot < num_slots; ++slot) {
                const int rounds = (count - slot + num_slots - 1) / num_slots;
                if (through_[static_cast<std::size_t>(slot)] < rounds) return false;
            }
            return true;
        });
    }

    Program program_;
    std::vector<int> stage_of_slot_;
    std::vector<int> round_;
    std::vector<int> last_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<int> through_;
};

const std::vector<Placement>& placements() {
    static const std::vector<Placement> all{Placement::linear(1), Placement::linear(3),
                                            Placement::looped(2, 2), Placement::wave(2, 1),
                                            Placement::bidirectional(2)};
    return all;
}

}  // namespace

TEST_CASE("an endless program counts the stage before, the slot before and the feeding") {
    const Program program = Program::endless(Placement::linear(2), 3);
    CHECK(program.is_endless());
    CHECK(program.num_devices() == 2);
    CHECK(program.num_actions() == 6);
    CHECK(program.entry(2) == 4);
    for (Position position = 0; position < 6; ++position) {
        CHECK(program.num_inputs(position) == 2);
        CHECK(program.num_first_inputs(position) == (position < 2 ? 1 : 2));
    }
    const auto released = program.releases(4);
    CHECK(std::vector<Position>(released.begin(), released.end()) == std::vector<Position>{0, 5});
    CHECK_THROWS_AS(Program::endless(Placement::linear(2), 0), std::invalid_argument);
}

TEST_CASE("slots go round in order, through any placement, however many there are") {
    for (const Placement& placement : placements()) {
        for (const int num_slots : {1, 2, 5}) {
            for (const int sleep_us : {0, 200}) {
                CAPTURE(placement.num_stages());
                CAPTURE(num_slots);
                CAPTURE(sleep_us);
                Procession procession(placement, num_slots);
                procession.sleep_us = sleep_us;
                Workers workers(placement.num_devices(), procession);
                WorkerProgram job(Program::endless(placement, num_slots));
                const int count = sleep_us == 0 ? 300 : 7;
                std::thread feeder;
                workers.run(job, no_interrupt, [&] {
                    feeder = std::thread([&] {
                        procession.feed(workers, job, count);
                        workers.stop(job);
                    });
                });
                feeder.join();
                CHECK(procession.num_run == count * placement.num_stages());
                CHECK(procession.num_broken == 0);
                CHECK(procession.num_inside == 0);
            }
        }
    }
}

TEST_CASE("an endless step ends by a failure, an interrupt, and by closing") {
    const Placement placement = Placement::linear(2);
    for (const int how : {0, 1, 2}) {
        Procession procession(placement, 4);
        Workers workers(2, procession);
        WorkerProgram job(Program::endless(placement, 4));
        if (how == 0) procession.failing = 3;
        std::thread closer;
        workers.run(
            job, [&] { return how == 1; },
            [&] {
                for (int slot = 0; slot < 4; ++slot) workers.feed(job, slot);
                if (how == 2) closer = std::thread([&] { workers.close(); });
            });
        if (closer.joinable()) closer.join();
        CHECK(procession.num_inside == 0);
        // It is over, so these do nothing.
        const int num_run = procession.num_run;
        workers.feed(job, 0);
        workers.stop(job);
        CHECK(procession.num_run == num_run);
    }
}

TEST_CASE("what a stopped step has left does not reach the next one") {
    const Placement placement = Placement::linear(2);
    Procession procession(placement, 4);
    Workers workers(2, procession);
    for (int times = 0; times < 50; ++times) {
        procession.begin();
        WorkerProgram job(Program::endless(placement, 4));
        workers.run(job, no_interrupt, [&] {
            for (int slot = 0; slot < 4; ++slot) workers.feed(job, slot);
            workers.stop(job);
        });
        CHECK(procession.num_run <= 8);
        procession.begin();
        WorkerProgram next(Program::endless(placement, 4));
        std::thread feeder;
        workers.run(next, no_interrupt, [&] {
            feeder = std::thread([&] {
                // Slots of another program change nothing.
                workers.feed(job, 0);
                workers.stop(job);
                procession.feed(workers, next, 9);
                workers.stop(next);
            });
        });
        feeder.join();
        CHECK(procession.num_run == 18);
        CHECK(procession.num_broken == 0);
    }
}
