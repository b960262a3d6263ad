#include <doctest/doctest.h>

#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "exec/stream_order.hpp"
#include "plan/check.hpp"
#include "plan/inputs.hpp"
#include "plan/updates.hpp"
#include "plans.hpp"
#include "plans_of_all_forms.hpp"

using namespace pykern;

namespace {

// A wait: the task that waits, and for which.
using StreamWait = std::pair<TaskNumber, TaskNumber>;

std::vector<StreamWait> waits_of(const StreamOrder& order) {
    std::vector<StreamWait> waits;
    for (TaskNumber task = 0; task < order.tasks().size(); ++task) {
        for (const TaskNumber input : order.waits(task)) waits.emplace_back(task, input);
    }
    return waits;
}

// By task: which others have ended before it starts, as streams and waits have it.
std::vector<std::vector<bool>> ended_before(const StreamOrder& order,
                                            const std::vector<StreamWait>& waits) {
    const std::size_t num_tasks = order.tasks().size();
    std::vector<std::vector<bool>> ended(num_tasks, std::vector<bool>(num_tasks));
    std::map<int, TaskNumber> last;
    auto wait = waits.begin();
    for (TaskNumber task = 0; task < num_tasks; ++task) {
        const auto add = [&](TaskNumber input) {
            for (TaskNumber i = 0; i < input; ++i)
                ended[task][i] = ended[task][i] || ended[input][i];
            ended[task][input] = true;
        };
        const int stream = order.tasks()[task].stream;
        if (const auto found = last.find(stream); found != last.end()) add(found->second);
        for (; wait != waits.end() && wait->first == task; ++wait) add(wait->second);
        last[stream] = task;
    }
    return ended;
}

// Pairs of tasks, of which the first must have ended before the second, by the lowered plan's
// rules.
class Dependencies {
   public:
    explicit Dependencies(const Plan& plan)
        : lowered_(lower(plan)), index_(lowered_.plan), order_(lowered_) {
        for (TaskNumber task = 0; task < order_.tasks().size(); ++task) {
            number_of_[order_.tasks()[task].action] = task;
        }
        for (const Row& row : lowered_.plan.rows()) {
            for (const Action action : row) add_inputs(action);
            for (const Action action : row) add_handover(action);
        }
        for (const Lane& lane : lowered_.lanes) {
            for (const Copy& copy : lane.copies) {
                if (copy.freed_by) add(*copy.freed_by, copy.action);
            }
        }
    }

    const StreamOrder& order() const { return order_; }

    std::string first_broken(const std::vector<StreamWait>& waits) const {
        const auto ended = ended_before(order_, waits);
        for (const auto& [from, to] : all_) {
            if (!ended[to][from]) return text(to) + " does not wait for " + text(from);
        }
        return "";
    }

    std::string text(TaskNumber task) const { return to_text(order_.tasks()[task].action); }

   private:
    void add(Action from, Action to) { all_.emplace_back(number_of_.at(from), number_of_.at(to)); }

    bool holds(Action action) const { return number_of_.contains(action); }

    void add_inputs(Action action) {
        for_each_input(action, index_, [&](Action input, int) {
            Action copy = input;
            copy.kind = input.stage < action.stage ? Kind::COPY_F : Kind::COPY_B;
            if (input.stage == action.stage || !holds(copy)) {
                add(input, action);
                return;
            }
            add(input, copy);
            add(copy, action);
        });
    }

    // Copies out of a slot have ended before the next F in it.
    void add_handover(Action action) {
        if (action.kind != Kind::F) return;
        const int replica = lowered_.plan.placement().replica_of(action.microbatch);
        const std::tuple place(replica, action.stage, order_.slot_of(action));
        if (const auto former = holder_.find(place); former != holder_.end()) {
            for (const Kind kind : {Kind::COPY_F, Kind::COPY_B}) {
                Action copy = former->second;
                copy.kind = kind;
                if (holds(copy)) add(copy, action);
            }
        }
        holder_[place] = action;
    }

    LoweredPlan lowered_;
    Index index_;
    StreamOrder order_;
    std::map<Action, TaskNumber> number_of_;
    std::map<std::tuple<int, int, int>, Action> holder_;
    std::vector<std::pair<TaskNumber, TaskNumber>> all_;
};

std::string text_of_waits(const Plan& plan) {
    const Dependencies of(plan);
    std::string text;
    for (const auto& [task, input] : waits_of(of.order())) {
        text += of.text(task) + "<" + of.text(input) + " ";
    }
    return text;
}

std::vector<NamedPlan> plans() {
    std::vector<NamedPlan> all = plans_of_all_forms();
    all.push_back({"slices", by_slots(Placement::linear(3), 3, 1, 8, 1, 4)});
    all.push_back({"updates", with_updates(by_slots(Placement::linear(3), 4, 1, 2), 1, 0)});
    return all;
}

}  // namespace

TEST_CASE("two devices wait in 1F1B for what comes, from which all else follows") {
    // Slots are free and outputs sent by then: a microbatch's F follows the B of the one before it
    // in the slot, and that B the whole way there and back.
    CHECK(text_of_waits(by_slots(Placement::linear(2), 4, 1, 2)) ==
          "0COPY_F0<0F0 0COPY_F1<0F1 1F0<0COPY_F0 1F1<0COPY_F1 1COPY_B0<1B0 0B0<1COPY_B0 "
          "1COPY_B1<1B1 0B1<1COPY_B1 0COPY_F2<0F2 1F2<0COPY_F2 0COPY_F3<0F3 1F3<0COPY_F3 "
          "1COPY_B2<1B2 0B2<1COPY_B2 1COPY_B3<1B3 0B3<1COPY_B3 ");
}

TEST_CASE("two devices wait in a forward for slots as well") {
    // Stage 0 has one slot, whose output must have left before the next F; stage 1 has two, which
    // are free again after 1F0 and 1F1.
    CHECK(text_of_waits(by_slots(Placement::linear(2), 4, 1, 2).forward_only()) ==
          "0COPY_F0<0F0 1F0<0COPY_F0 0F1<0COPY_F0 0COPY_F1<0F1 1F1<0COPY_F1 0F2<0COPY_F1 "
          "0COPY_F2<0F2 0COPY_F2<1F0 1F2<0COPY_F2 0F3<0COPY_F2 0COPY_F3<0F3 0COPY_F3<1F1 "
          "1F3<0COPY_F3 ");
}

TEST_CASE("a row is one stream, in its order, and no wait is for what comes later") {
    for (const NamedPlan& named : plans()) {
        CAPTURE(named.name);
        const StreamOrder order(lower(named.plan));
        std::vector<Row> rows(static_cast<std::size_t>(order.num_streams()));
        for (const Task& task : order.tasks()) {
            rows[static_cast<std::size_t>(task.stream)].push_back(task.action);
        }
        rows.resize(named.plan.rows().size());
        CHECK(rows == named.plan.rows());
        std::vector<bool> awaited(order.tasks().size());
        for (const auto& [task, input] : waits_of(order)) {
            CHECK(input < task);
            CHECK(order.tasks()[input].stream != order.tasks()[task].stream);
            awaited[input] = true;
        }
        for (TaskNumber task = 0; task < awaited.size(); ++task) {
            CHECK(order.tasks()[task].awaited == awaited[task]);
        }
    }
}

TEST_CASE("streams and waits keep every dependency, and no wait can be left out") {
    for (const NamedPlan& named : plans()) {
        CAPTURE(named.name);
        const Dependencies of(named.plan);
        std::vector<StreamWait> waits = waits_of(of.order());
        CHECK(of.first_broken(waits) == "");
        for (std::size_t i = 0; i < waits.size(); ++i) {
            CAPTURE(of.text(waits[i].first));
            CAPTURE(of.text(waits[i].second));
            std::vector<StreamWait> others = waits;
            others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
            CHECK(of.first_broken(others) != "");
        }
    }
}

TEST_CASE("in a forward the slots are enough for every output to leave in time") {
    // Were 1COPY_F2 to wait for 2F0, then 1F4 for its slot, and so 0F7 for its own: 2F0 stands
    // behind it.
    const Plan plan = by_phases(Placement::looped(2, 2), 8, {16, 16}, 8).forward_only();
    LoweredPlan lowered = lower(plan);
    const StreamOrder order(lowered);
    CHECK(order.num_slots(0, 1) == 2);
    CHECK(order.num_slots(0, 2) == 7);
    CHECK(order.num_slots(0, 3) == 2);
    Copy& copy = lowered.lanes[1].copies[2];
    CHECK(to_text(copy.action) == "1COPY_F2");
    copy.slot = 0;
    copy.freed_by = parse_action("2F0");
    CHECK_THROWS_AS(StreamOrder{lowered}, PlanError);
}

TEST_CASE("a copy does not wait for what copies behind it in its lane must come before") {
    // 1W0 frees a slot of stage 1 in time for 1F1. It comes behind 3F0, though, whose input is
    // behind that of 1F1 in the lane.
    const Plan plan = plan_of(Placement::looped(2, 2), 2,
                              {"0F0 0F1 2F0 2I0 2W0 0I0 0W0 2F1 2I1 2W1 0I1 0W1",
                               "1F0 3F0 3I0 1I0 1W0 3W0 1F1 3F1 3I1 3W1 1I1 1W1"});
    const LoweredPlan lowered = lower(plan);
    const Copy& copy = lowered.lanes[0].copies[1];
    CHECK(to_text(copy.action) == "0COPY_F1");
    CHECK(!copy.freed_by);
    CHECK_NOTHROW(StreamOrder{lowered});
}
