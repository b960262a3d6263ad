// Program: a checked plan as the executor wants it, with what each action waits for and releases.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.hpp"

namespace pykern {

// Position of an action in a program: rows one after another, each in its order.
using Position = std::uint32_t;

// Immutable. An action waits for its inputs and for the action before it in its row. Counting the
// row as an input is what keeps a device serial without a lock: an action becomes ready exactly
// once, when its last input is done, and by then its device is free.
//
// An endless program has forwards only and no rows. Its microbatches are slots, which are fed one
// after another, the first again after the last. A forward waits for the stage before and for the
// same stage's forward of the slot before, whose round may be the last one; in the first stage it
// waits for the slot to be fed. So each stage has its microbatches in order, and a device does what
// has come first.
//
// A part of a plan holds what stands between two positions of each row. Actions before it count
// as done: programs of one part after another run the plan, with a pause of all devices in between.
//
// A program that issues has the actions of each device's row, which only the thread of the device
// may run, and behind the rows others, such as copies, which any thread may run.
class Program {
   public:
    struct Edge {
        Position from;
        Position to;
    };

    // Throws PlanError when the plan cannot run.
    explicit Program(const Plan& plan);
    // The actions from `begins` up to `ends` of each row. Throws PlanError when the plan cannot
    // run; std::invalid_argument where no action is there, no such positions, or an action needs
    // one that stands behind the part.
    static Program part(const Plan& plan, const std::vector<std::size_t>& begins,
                        const std::vector<std::size_t>& ends);
    // Throws std::invalid_argument for less than one slot.
    static Program endless(const Placement& placement, int num_slots);
    // The content of a program that issues. Actions stand row by row, and then those of no row,
    // each with its device. The edges are all that actions wait for, also in their rows.
    struct Issued {
        std::vector<Action> actions;
        std::vector<int> devices;
        std::vector<Position> row_begin;
        std::vector<Edge> edges;
    };
    static Program issuing(Placement placement, int num_slices, Issued issued);

    bool is_endless() const { return num_slots_ > 0; }
    bool is_issuing() const { return is_issuing_; }
    // In a program that issues, whether only the thread of the action's device may run it.
    bool is_in_row(Position position) const { return position < row_begin_.back(); }
    // Slots of an endless program.
    int num_slots() const { return num_slots_; }
    // The first stage's forward of a slot.
    Position entry(int slot) const { return static_cast<Position>(slot * num_stages()); }

    int num_devices() const { return placement_.num_devices(); }
    const Placement& placement() const { return placement_; }
    int num_stages() const { return placement_.num_stages(); }
    int num_slices() const { return num_slices_; }
    // Which kinds there are.
    const std::array<bool, kNumKinds>& held() const { return held_; }
    std::size_t num_actions() const { return actions_.size(); }

    const Action& action(Position position) const { return actions_[position]; }
    int device_of(Position position) const { return device_[position]; }
    // Number of the action's stage among the stages of all replicas, replica after replica.
    std::size_t stage_of_replica(Position position) const {
        const Action& action = actions_[position];
        const auto replica = static_cast<std::size_t>(placement_.replica_of(action.microbatch));
        return replica * static_cast<std::size_t>(num_stages()) + action.stage;
    }
    // First position of the row; row_begin(num_devices()) is the end of the last one.
    Position row_begin(int device) const { return row_begin_[static_cast<std::size_t>(device)]; }

    int num_inputs(Position position) const { return num_inputs_[position]; }
    // When a step begins: in an endless program no round has been before the first.
    int num_first_inputs(Position position) const { return num_first_inputs_[position]; }
    std::span<const Position> releases(Position position) const {
        return {releases_.data() + release_begin_[position],
                releases_.data() + release_begin_[position + 1]};
    }

   private:
    Program(const Plan& plan, const std::vector<std::size_t>& begins,
            const std::vector<std::size_t>& ends);
    Program(const Placement& placement, int num_slots);
    Program(Placement placement, int num_slices, Issued issued);

    void connect(const std::vector<Edge>& edges);

    Placement placement_;
    int num_slices_;
    int num_slots_ = 0;
    bool is_issuing_ = false;
    std::array<bool, kNumKinds> held_{};
    std::vector<Action> actions_;
    std::vector<int> device_;
    std::vector<Position> row_begin_;
    std::vector<int> num_inputs_;
    std::vector<int> num_first_inputs_;
    std::vector<std::size_t> release_begin_;
    std::vector<Position> releases_;
};

}  // namespace pykern
