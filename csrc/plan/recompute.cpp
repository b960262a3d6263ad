#include "plan/recompute.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/check.hpp"
#include "plan/clock.hpp"
#include "plan/index.hpp"
#include "plan/order.hpp"
#include "plan/range_max.hpp"
#include "plan/simulate.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

// The cells that are to be recomputed.
class Cells {
   public:
    Cells(const Plan& plan, const std::vector<Action>& cells)
        : num_microbatches_(static_cast<std::size_t>(plan.num_microbatches())),
          is_given_(static_cast<std::size_t>(plan.num_stages()) * num_microbatches_, false) {
        const Index index(plan);
        const int first_trained = plan.first_trained();
        for (const Action& cell : cells) {
            require_cell(plan, cell);
            if (cell.stage < first_trained) refuse(cell, "of stages with a backward");
            if (index.at(cell) >= 0) refuse(cell, "new to the plan");
            if (has(cell)) refuse(cell, "given once");
            is_given_[number_of(cell)] = true;
        }
    }

    // Whether the cell of this action is one of them.
    bool has(Action action) const { return is_given_[number_of(action)]; }

   private:
    [[noreturn]] static void refuse(Action cell, const std::string& rule) {
        throw std::invalid_argument("cells must be " + rule + ", got " + to_text(cell));
    }

    static void require_cell(const Plan& plan, Action cell) {
        if (cell.kind != Kind::R) refuse(cell, "R actions");
        if (cell.stage < plan.num_stages() && cell.slice == 0 &&
            cell.microbatch < static_cast<std::size_t>(plan.num_microbatches())) {
            return;
        }
        refuse(cell, "within the plan's " + std::to_string(plan.num_stages()) + " stages and " +
                         std::to_string(plan.num_microbatches()) + " microbatches");
    }

    std::size_t number_of(Action action) const {
        return action.stage * num_microbatches_ + action.microbatch;
    }

    std::size_t num_microbatches_;
    std::vector<bool> is_given_;
};

// A plan on its way.
class Draft {
   public:
    explicit Draft(const Plan& plan)
        : plan_(plan), rows_(plan.rows().size()), overlaps_(plan.rows().size()) {}

    void put(std::size_t device, Action action) { rows_[device].push_back(action); }

    // So many actions of the plan's row, two of which share a slot.
    void copy(std::size_t device, std::size_t position, std::size_t together) {
        if (together == 2) overlaps_[device].push_back(rows_[device].size());
        const Row& row = plan_.rows()[device];
        for (std::size_t i = 0; i < together; ++i) rows_[device].push_back(row[position + i]);
    }

    Plan finished() && {
        return {plan_.placement(), plan_.num_microbatches(), std::move(rows_), plan_.num_slices(),
                std::move(overlaps_)};
    }

   private:
    const Plan& plan_;
    std::vector<Row> rows_;
    std::vector<Overlaps> overlaps_;
};

// Every R right before its B or I, or before the pair that this is in.
Plan with_each_when_due(const Plan& plan, const Cells& cells) {
    Draft draft(plan);
    for (std::size_t device = 0; device < plan.rows().size(); ++device) {
        const Row& row = plan.rows()[device];
        const auto is_due = [&](std::size_t position) {
            const Action action = row[position];
            if (action.kind != Kind::B && action.kind != Kind::I) return false;
            if (!cells.has(action)) return false;
            return row[position - 1] != with_kind(action, Kind::F);
        };
        for (std::size_t position = 0; position < row.size();) {
            const bool pair = std::ranges::binary_search(plan.overlaps()[device], position);
            const std::size_t together = pair ? 2 : 1;
            for (std::size_t i = position; i < position + together; ++i) {
                if (is_due(i)) draft.put(device, with_kind(row[i], Kind::R));
            }
            draft.copy(device, position, together);
            position += together;
        }
    }
    return std::move(draft).finished();
}

// Bytes that each device holds along its row, and whether an R can come earlier.
class Room {
   public:
    Room(const Plan& due, const Index& index, const Memory& memory, double cap_bytes)
        : due_(due), index_(index), memory_(memory), cap_bytes_(cap_bytes) {
        for (const Row& row : due.rows()) {
            std::vector<double> held_bytes;
            double bytes = 0;
            for (const Action& action : row) {
                const Held held = held_by(action, index, memory);
                held_bytes.push_back(bytes + std::max(0.0, held.at_start));
                bytes += held.at_start + held.at_end;
            }
            held_.emplace_back(held_bytes);
        }
    }

    // Moves an R ahead of a position, unless the device would then hold more than the cap.
    bool move(std::size_t device, std::size_t from, std::size_t to) {
        const double bytes = held_by(due_.rows()[device][from], index_, memory_).at_start;
        if (bytes > 0 && held_[device].max(to, from) + bytes > cap_bytes_) return false;
        held_[device].add(to, from, bytes);
        return true;
    }

   private:
    const Plan& due_;
    const Index& index_;
    const Memory& memory_;
    double cap_bytes_;
    std::vector<RangeMax> held_;
};

enum class Fill : std::uint8_t { kLongWaits, kAllWaits };

// Goes in a walk over the plan with every R where it is due, and moves them to where a device
// waits.
class Filling {
   public:
    Filling(const Plan& due, const Index& index, const Cells& cells, const Costs& costs, Room room,
            Fill fill)
        : due_(due),
          index_(index),
          cells_(cells),
          room_(std::move(room)),
          fill_(fill),
          clock_(due, costs),
          draft_(due),
          can_run_(due.rows().size()) {
        for (const Row& row : due.rows()) has_run_.emplace_back(row.size(), false);
    }

    void begin() { clock_.begin(); }
    void input(Action action, Action input, std::size_t sender, std::size_t position) {
        clock_.input(action, input, sender, position);
    }
    void finish(std::size_t device, std::size_t position, std::size_t together) {
        if (has_run_[device][position]) {
            clock_.leave_out(device, position);
            return;
        }
        fill_wait(device, position);
        clock_.finish(device, position, together);
        draft_.copy(device, position, together);
        for (std::size_t i = position; i < position + together; ++i) {
            add_what_can_run(device, due_.rows()[device][i]);
        }
    }

    Plan finished() && { return std::move(draft_).finished(); }

   private:
    // Once its input is there an R can run, and where it is due it must.
    void add_what_can_run(std::size_t device, Action action) {
        const bool offloaded = index_.at(with_kind(action, Kind::LOAD)) >= 0;
        if (action.kind != (offloaded ? Kind::LOAD : Kind::F) || !cells_.has(action)) return;
        const int stands = index_.at(with_kind(action, Kind::R));
        if (stands < 0) return;
        std::vector<std::size_t>& can_run = can_run_[device];
        can_run.push_back(
            static_cast<std::size_t>(stands - index_.row_start(static_cast<int>(device))));
        std::ranges::push_heap(can_run, std::greater());
    }

    // The first that does not fit ends it: those that are due later hold their place for longer.
    void fill_wait(std::size_t device, std::size_t position) {
        std::vector<std::size_t>& can_run = can_run_[device];
        while (!can_run.empty()) {
            const std::size_t due = can_run.front();
            if (due > position) {
                if (!fits(device, due)) return;
                if (!room_.move(device, due, position)) return;
                const Action recompute = due_.rows()[device][due];
                clock_.put(device, recompute);
                draft_.put(device, recompute);
                has_run_[device][due] = true;
            }
            std::ranges::pop_heap(can_run, std::greater());
            can_run.pop_back();
        }
    }

    bool fits(std::size_t device, std::size_t due) const {
        const double wait_ns = clock_.wait_ns(device);
        if (fill_ == Fill::kAllWaits) return wait_ns > 0;
        return wait_ns > 0 && clock_.duration_ns(device, due_.rows()[device][due]) <= wait_ns;
    }

    const Plan& due_;
    const Index& index_;
    const Cells& cells_;
    Room room_;
    Fill fill_;
    Clock clock_;
    Draft draft_;
    // By device: where those R are due that can run. A heap, the earliest in front.
    std::vector<std::vector<std::size_t>> can_run_;
    // By device and position: whether it has run ahead of its place.
    std::vector<std::vector<bool>> has_run_;
};

void require_recomputable(const Plan& plan, const std::optional<Memory>& memory, double cap_bytes) {
    if (!plan.has(Kind::B) && !plan.has(Kind::I)) {
        throw std::invalid_argument("plan must have backwards to recompute for, got one without");
    }
    if (plan.num_slices() > 1) {
        throw std::invalid_argument(
            "plan must have whole microbatches to be recomputed, got " +
            std::to_string(plan.num_slices()) +
            " slices. A slice's R would need those of the slices before it");
    }
    if (!(cap_bytes >= 0)) {
        throw std::invalid_argument("cap_bytes must be at least 0, got " +
                                    std::to_string(cap_bytes));
    }
    if (memory) {
        memory->require_stages(plan.num_stages());
    } else if (cap_bytes < std::numeric_limits<double>::infinity()) {
        throw std::invalid_argument("memory must be given beside cap_bytes, got cap_bytes=" +
                                    std::to_string(cap_bytes) + " alone");
    }
}

struct Timed {
    Plan plan;
    double makespan_ns;
};

// A plan and its R, to be placed within any cap.
class Recomputation {
   public:
    Recomputation(const Plan& plan, const std::vector<Action>& cells, const Costs& costs)
        : costs_(costs),
          cells_(plan, cells),
          due_(with_each_when_due(plan, cells_)),
          index_(due_) {}

    Timed within(const Memory& memory, double cap_bytes) const {
        const Room room(due_, index_, memory, cap_bytes);
        Timed first = filled(room, Fill::kLongWaits);
        Timed second = filled(room, Fill::kAllWaits);
        return second.makespan_ns < first.makespan_ns ? second : first;
    }

   private:
    Timed filled(Room room, Fill fill) const {
        Filling filling(due_, index_, cells_, costs_, std::move(room), fill);
        walk(due_, index_, filling);
        Plan plan = std::move(filling).finished();
        const double makespan_ns = simulate(plan, costs_).makespan_ns();
        return {.plan = std::move(plan), .makespan_ns = makespan_ns};
    }

    const Costs& costs_;
    Cells cells_;
    Plan due_;
    Index index_;
};

// Where all cells count the same: as few on a device as let the step end as early as without a cap.
Plan in_least_memory(const Recomputation& recomputation) {
    const Memory one(1.0, 1.0);
    const Timed free = recomputation.within(one, std::numeric_limits<double>::infinity());
    const int most = static_cast<int>(std::ranges::max(peak_bytes(free.plan, one)));
    const auto is_enough = [&](int count) {
        return recomputation.within(one, count).makespan_ns <= free.makespan_ns;
    };
    int too_few = 0;
    int enough = 1;
    while (enough < most && !is_enough(enough)) {
        too_few = enough;
        enough = std::min(2 * enough, most);
    }
    while (enough - too_few > 1) {
        const int middle = too_few + (enough - too_few) / 2;
        (is_enough(middle) ? enough : too_few) = middle;
    }
    return recomputation.within(one, enough).plan;
}

}  // namespace

Plan with_recompute(const Plan& plan, const std::vector<Action>& cells, const Costs& costs,
                    const std::optional<Memory>& memory, double cap_bytes) {
    check(plan);
    require_recomputable(plan, memory, cap_bytes);
    const Recomputation recomputation(plan, cells, costs);
    if (memory) return recomputation.within(*memory, cap_bytes).plan;
    return in_least_memory(recomputation);
}

}  // namespace pykern
