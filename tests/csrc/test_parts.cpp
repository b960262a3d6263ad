#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "exec/workers.hpp"
#include "plan/check.hpp"
#include "plan/generate.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/updates.hpp"
#include "plans.hpp"

using namespace pykern;

namespace {

using Ends = std::vector<std::size_t>;

// 1F1B on two devices, and where the first begins with its third microbatch.
Plan cut_plan() {
    return plan_of(Placement::linear(2), 3, {"0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"});
}

Ends cut() { return {3, 3}; }

std::vector<std::string> texts(const Program& program) {
    std::vector<std::string> found;
    found.reserve(program.num_actions());
    for (Position position = 0; position < program.num_actions(); ++position) {
        found.push_back(to_text(program.action(position)));
    }
    return found;
}

// Marks, in plain memory, what has run of a plan, whichever part it is in; a worker that ran an
// action before one of its inputs breaks the order.
class Marks final : public Client {
   public:
    explicit Marks(const Plan& plan) : index_(plan), done_(plan.num_actions(), 0) {}

    void attach(int /*worker*/) noexcept override {}
    void detach(int /*worker*/) noexcept override {}
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int /*worker*/) noexcept override { return true; }
    void leave(int /*worker*/) noexcept override {}

    bool run(int /*worker*/, Position position) noexcept override {
        const Action action = part->action(position);
        const auto here = static_cast<std::size_t>(index_.at(action));
        for_each_input(action, index_, [&](Action, int input) {
            if (done_[static_cast<std::size_t>(input)] != 1) ++num_broken;
        });
        ++done_[here];
        return true;
    }

    bool all_once() const {
        return std::ranges::all_of(done_, [](int times) { return times == 1; });
    }

    const Program* part = nullptr;
    std::atomic<int> num_broken{0};

   private:
    Index index_;
    std::vector<int> done_;
};

}  // namespace

TEST_CASE("a part holds what stands between two positions, and waits for nothing before it") {
    const Program first = Program::part(cut_plan(), {0, 0}, cut());
    CHECK(texts(first) == std::vector<std::string>{"0F0", "0F1", "0B0", "1F0", "1B0", "1F1"});
    const Program rest = Program::part(cut_plan(), cut(), {6, 6});
    CHECK(texts(rest) == std::vector<std::string>{"0F2", "0B1", "0B2", "1B1", "1F2", "1B2"});
    CHECK(rest.row_begin(1) == 3);
    CHECK(rest.device_of(3) == 1);
    // 0B1 waits for its row and 1B1, not for 0F1; 1B1, whose inputs stand before the part, for
    // none.
    const std::vector<int> expected{0, 2, 3, 0, 2, 1};
    for (Position position = 0; position < rest.num_actions(); ++position) {
        CAPTURE(position);
        CHECK(rest.num_inputs(position) == expected[position]);
    }
}

TEST_CASE("a part holds its own kinds") {
    const Program part = Program::part(cut_plan(), {0, 0}, {2, 1});
    CHECK(part.held()[static_cast<std::size_t>(Kind::F)]);
    CHECK_FALSE(part.held()[static_cast<std::size_t>(Kind::B)]);
}

TEST_CASE("a part that is all of a plan is the program of the plan") {
    const Plan plan = by_slots(Placement::wave(3, 2), 7, 3, 24);
    Ends ends;
    for (const Row& row : plan.rows()) ends.push_back(row.size());
    const Program whole(plan);
    const Program part = Program::part(plan, Ends(3, 0), ends);
    CHECK(texts(part) == texts(whole));
    for (Position position = 0; position < whole.num_actions(); ++position) {
        CHECK(std::ranges::equal(part.releases(position), whole.releases(position)));
    }
}

TEST_CASE("an action whose input stands behind the part is refused") {
    // 0B0 needs 1B0, which the second row ends before.
    CHECK_THROWS_WITH_AS(
        Program::part(cut_plan(), {0, 0}, {3, 1}),
        "a part must hold the inputs of its actions, got 0B0 without 1B0, which is behind the part",
        std::invalid_argument);
}

TEST_CASE("positions that are none are refused") {
    CHECK_THROWS_AS(Program::part(cut_plan(), {0}, cut()), std::invalid_argument);
    CHECK_THROWS_AS(Program::part(cut_plan(), {0, 0}, {3}), std::invalid_argument);
    CHECK_THROWS_AS(Program::part(cut_plan(), {4, 0}, cut()), std::invalid_argument);
    CHECK_THROWS_AS(Program::part(cut_plan(), cut(), {7, 6}), std::invalid_argument);
    CHECK_THROWS_WITH_AS(Program::part(cut_plan(), cut(), cut()),
                         "a part must have at least one action, got none", std::invalid_argument);
    CHECK_THROWS_AS(Program::part(plan_of(Placement::linear(1), 1, {"0B0 0F0"}), {0}, {2}),
                    PlanError);
}

TEST_CASE("workers run a plan part by part, every action once and after its inputs") {
    const int num_microbatches = 12;
    const Plan plan = with_updates(by_slots(Placement::linear(4), num_microbatches, 1, 2), 1, 0);
    // Each part ends where the rows begin with a later microbatch.
    Marks marks(plan);
    Workers workers(4, marks);
    Ends begins(4, 0);
    for (int fed = 4; fed <= num_microbatches + 4; fed += 4) {
        Ends ends;
        for (const Row& row : plan.rows()) {
            const auto later = [&](Action action) {
                return action.kind == Kind::F && static_cast<int>(action.microbatch) >= fed;
            };
            ends.push_back(
                static_cast<std::size_t>(std::ranges::find_if(row, later) - row.begin()));
        }
        if (ends == begins) continue;
        WorkerProgram job(Program::part(plan, begins, ends));
        marks.part = &job.program;
        workers.run(job, [] { return false; });
        begins = ends;
    }
    CHECK(marks.all_once());
    CHECK(marks.num_broken == 0);
}
