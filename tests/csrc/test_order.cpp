#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "plan/generate.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/order.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("the index finds every action and nothing else") {
    const Plan plan = plan_of(Placement::linear(2), 2, {"0F1 0F0", "1F0 1F1"});
    const Index index(plan);
    CHECK(index.at({1, 0, Kind::F}) == 0);
    CHECK(index.at({0, 0, Kind::F}) == 1);
    CHECK(index.at({1, 1, Kind::F}) == 3);
    CHECK(index.at({1, 1, Kind::B}) == -1);
    CHECK(index.row_start(1) == 2);
    CHECK(index.has(Kind::F));
    CHECK_FALSE(index.has(Kind::B));
}

namespace {

// Remembers what ran, and whether every row ran in its order and every action after its inputs.
class Recorder {
   public:
    Recorder(const Plan& plan, const Index& index)
        : plan_(plan), index_(index), ran_(plan.num_actions()), next_(plan.rows().size()) {}

    void begin() { inputs_.clear(); }
    void input(Action /*action*/, Action input, std::size_t row, std::size_t position) {
        inputs_.push_back(input);
        CHECK(plan_.rows()[row][position] == input);
    }
    void finish(std::size_t row, std::size_t position, std::size_t together) {
        CHECK(position == next_[row]);
        next_[row] += together;
        const int start = index_.row_start(static_cast<int>(row));
        for (std::size_t i = position; i < position + together; ++i) {
            std::size_t from_elsewhere = 0;
            for_each_input(plan_.rows()[row][i], index_, [&](Action input, int stands) {
                CHECK(ran_[static_cast<std::size_t>(stands)]);
                if (plan_.device_of(input) != static_cast<int>(row)) ++from_elsewhere;
            });
            CHECK(from_elsewhere == inputs_.size());
            ran_[static_cast<std::size_t>(start) + i] = true;
        }
    }

   private:
    const Plan& plan_;
    const Index& index_;
    std::vector<bool> ran_;
    std::vector<std::size_t> next_;
    std::vector<Action> inputs_;
};

std::vector<std::size_t> walk_and_check(const Plan& plan) {
    const Index index(plan);
    Recorder recorder(plan, index);
    return walk(plan, index, recorder);
}

}  // namespace

TEST_CASE("a walk keeps rows and puts inputs first") {
    for (const int num_devices : {1, 2, 3, 5}) {
        CAPTURE(num_devices);
        const Plan plan =
            by_slots(Placement::wave(num_devices, 2), 6, num_devices, 8 * num_devices);
        const auto per_row = plan.num_actions() / plan.rows().size();
        CHECK(walk_and_check(plan) == std::vector<std::size_t>(plan.rows().size(), per_row));
    }
}

TEST_CASE("many devices can wait for one") {
    // The last device has a stage between each two others, in an order that suits only the first.
    const Placement placement(4, {0, 3, 1, 3, 2, 3});
    const Plan plan =
        plan_of(placement, 2, {"0F0 0F1", "2F1 2F0", "4F0 4F1", "1F0 1F1 3F1 3F0 5F0 5F1"});
    CHECK(walk_and_check(plan) == std::vector<std::size_t>{2, 2, 2, 6});
}

TEST_CASE("who waits for many devices does not look at all of them again each time") {
    // Replica m is alone on device m, and device 0 reduces over all of them.
    constexpr int kNumReplicas = 100;
    std::vector<Replica> replicas;
    std::vector<std::string> rows;
    for (int replica = 0; replica < kNumReplicas; ++replica) {
        const std::string number = std::to_string(replica);
        replicas.push_back({replica});
        rows.push_back("0F" + number + " 0B" + number);
    }
    rows[0] += " 0REDUCE0";
    for (const bool reversed : {false, true}) {
        CAPTURE(reversed);
        if (reversed) {
            std::ranges::reverse(replicas.begin() + 1, replicas.end());
            std::ranges::reverse(rows.begin() + 1, rows.end());
        }
        const Plan plan = plan_of(Placement(kNumReplicas, replicas), kNumReplicas, rows);
        struct {
            int num_inputs = 0;
            void begin() {}
            void input(Action, Action, std::size_t, std::size_t) { ++num_inputs; }
            void finish(std::size_t, std::size_t, std::size_t) {}
        } run;
        const Index index(plan);
        CHECK(walk(plan, index, run)[0] == 3);
        CHECK(run.num_inputs <= 2 * kNumReplicas);
    }
}

TEST_CASE("a deadlock ends the walk where each row stops") {
    const Plan plan = plan_of(Placement(2, {0, 1, 0}), 1, {"2F0 0F0", "1F0"});
    CHECK(walk_and_check(plan) == std::vector<std::size_t>{0, 0});
}
