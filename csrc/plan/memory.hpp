// Memory: what a plan holds, by its rows alone: a device computes one action at a time, so what it
// holds follows from their order and not from their times.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "plan/index.hpp"
#include "plan/plan.hpp"
#include "plan/stage_values.hpp"

namespace pykern {

// Bytes of one microbatch on one stage; a slice holds its share. Each is finite, and at least 0.
class Memory {
   public:
    // activation_bytes is held from F to the end of B or I. A cell that the plan recomputes holds
    // boundary_bytes, its inputs, from F to R, and rebuilt_bytes from R to the end of B or I: as
    // much as activation_bytes where it is not given, less where B rebuilds a part of the graph at
    // a time. Either way kept_bytes is held on to the end of W. Between OFFLOAD and LOAD nothing is
    // held. Where a stage has forwards alone, each holds activation_bytes until its end.
    Memory(StageValues activation_bytes, StageValues kept_bytes, StageValues boundary_bytes = 0.0,
           std::optional<StageValues> rebuilt_bytes = {});

    const StageValues& activation_bytes() const { return activation_bytes_; }
    const StageValues& kept_bytes() const { return kept_bytes_; }
    const StageValues& boundary_bytes() const { return boundary_bytes_; }
    const StageValues& rebuilt_bytes() const { return rebuilt_bytes_; }
    void require_stages(int num_stages) const;

    friend bool operator==(const Memory&, const Memory&) = default;

   private:
    StageValues activation_bytes_;
    StageValues kept_bytes_;
    StageValues boundary_bytes_;
    StageValues rebuilt_bytes_;
};

// By how much an action changes what its device holds: when it starts, and when it ends.
struct Held {
    double at_start;
    double at_end;
};

Held held_by(Action action, const Index& index, const Memory& memory);

// Calls visit(device, position, bytes held while the action there runs) for each action of a plan
// that has passed `check`.
template <class Visit>
void for_each_held(const Plan& plan, const Memory& memory, Visit visit) {
    memory.require_stages(plan.num_stages());
    const Index index(plan);
    for (std::size_t device = 0; device < plan.rows().size(); ++device) {
        const Row& row = plan.rows()[device];
        double bytes = 0;
        for (std::size_t position = 0; position < row.size(); ++position) {
            const Held held = held_by(row[position], index, memory);
            bytes += held.at_start;
            visit(static_cast<int>(device), position, bytes);
            bytes += held.at_end;
        }
    }
}

// Most bytes that each device holds at once. The plan must have passed `check`.
std::vector<double> peak_bytes(const Plan& plan, const Memory& memory);

}  // namespace pykern
