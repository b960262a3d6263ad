#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "exec/short_step.hpp"
#include "plan/generate.hpp"
#include "plans.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

// Notes what runs, and on which thread.
class Notes final : public Client {
   public:
    void attach(int /*worker*/) noexcept override {}
    void detach(int /*worker*/) noexcept override {}
    void resume(int /*worker*/) noexcept override { ++num_locked; }
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int /*worker*/) noexcept override {
        ++num_inside;
        return may_enter;
    }
    void leave(int /*worker*/) noexcept override { --num_inside; }

    bool run(int /*worker*/, Position position) noexcept override {
        if (pause > 0us) std::this_thread::sleep_for(pause);
        run_here.push_back(position);
        thread = std::this_thread::get_id();
        if (closed_by_action != nullptr) closed_by_action->begin_to_close();
        return position != failing;
    }

    // The actions that have run, of which the next step begins anew.
    std::vector<Position> taken() { return std::exchange(run_here, {}); }

    std::vector<Position> run_here;
    std::thread::id thread;
    int num_locked = 0;
    int num_inside = 0;
    bool may_enter = true;
    Position failing = static_cast<Position>(-1);
    std::chrono::microseconds pause{0};
    Workers* closed_by_action = nullptr;
};

std::vector<Position> up_to(std::size_t end) {
    std::vector<Position> positions(end);
    std::iota(positions.begin(), positions.end(), Position{0});
    return positions;
}

Plan on(int num_devices) {
    return by_slots(Placement::wave(num_devices, 1), 4, num_devices, 4 * num_devices);
}

}  // namespace

TEST_CASE("a step of one device is short once all its actions are known to be") {
    const Plan plan = on(1);
    Notes notes;
    Workers workers(1, notes);
    WorkerProgram job(plan);
    CHECK_FALSE(is_short(job));
    workers.run(job, [] { return false; });
    CHECK(is_short(job));

    // Together the actions take longer than 20 ms, though each takes much less.
    WorkerProgram slow(plan);
    notes.pause = 20'000us / plan.num_actions() + 1us;
    workers.run(slow, [] { return false; });
    CHECK_FALSE(is_short(slow));

    // Known to be short, but of two devices, or without an end.
    WorkerProgram wide(on(2));
    WorkerProgram endless(Program::endless(Placement::linear(1), 2));
    for (WorkerProgram* each : {&wide, &endless}) {
        for (Position position = 0; position < each->program.num_actions(); ++position) {
            each->pace.observe(each->program.action(position), 1);
        }
        CHECK_FALSE(is_short(*each));
    }
}

TEST_CASE("a short step runs every action on the calling thread, without the lock of workers") {
    const Plan plan = on(1);
    Notes notes;
    Workers workers(1, notes);
    WorkerProgram job(plan);
    for (int step = 0; step < 5; ++step) {
        notes.num_locked = 0;
        run_short(job, notes, workers);
        CHECK(notes.taken() == up_to(plan.num_actions()));
        CHECK(notes.thread == std::this_thread::get_id());
        CHECK(notes.num_locked == 0);
        // Steps on the worker's thread go on beside these.
        workers.run(job, [] { return false; });
        CHECK(notes.taken() == up_to(plan.num_actions()));
        CHECK(notes.thread != std::this_thread::get_id());
        CHECK(notes.num_locked > 0);
    }
    CHECK(job.trace.timeline(job.program, 1).rows()[0].size() == plan.num_actions());
}

TEST_CASE("a failure ends a short step, and the next one is whole") {
    const Plan plan = on(1);
    Notes notes;
    Workers workers(1, notes);
    WorkerProgram job(plan);
    for (Position failing = 0; failing < plan.num_actions(); ++failing) {
        notes.failing = failing;
        run_short(job, notes, workers);
        CHECK(notes.taken() == up_to(failing + 1));
        // The action that failed has no time.
        CHECK(job.trace.timeline(job.program, 0).rows()[0].size() == failing);
        notes.failing = static_cast<Position>(-1);
        run_short(job, notes, workers);
        CHECK(notes.taken() == up_to(plan.num_actions()));
    }
    notes.may_enter = false;
    run_short(job, notes, workers);
    CHECK(notes.taken().empty());
    CHECK(notes.num_inside == 0);
}

TEST_CASE("closing ends a short step after its action") {
    Notes notes;
    Workers workers(1, notes);
    WorkerProgram job(on(1));
    notes.closed_by_action = &workers;
    run_short(job, notes, workers);
    CHECK(notes.taken() == up_to(1));
    CHECK(notes.num_inside == 0);
    run_short(job, notes, workers);
    CHECK(notes.taken().empty());
    CHECK(job.trace.size() == 1);
}
