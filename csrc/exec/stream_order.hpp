// Stream order: a lowered plan in the order in which one thread issues it to streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/lower.hpp"

namespace pykern {

using TaskNumber = std::uint32_t;

// An action of the plan on the compute stream of its device, or a copy on a copy stream.
struct Task {
    Action action;
    int stream;
    // The slot of the action's cell, or of the cell that a copy is for.
    int slot;
    // Whether a task of another stream waits for it.
    bool awaited = false;
};

// A copy stream belongs to the sender, one for each receiver and kind of copy. Gradients do not
// queue behind activations, which wait for slots: so a gradient leaves whatever the receiver does.
struct CopyStream {
    int sender;
    int receiver;
    Kind kind;
};

// Immutable. Tasks stand in one order that respects all they wait for. A stream runs its tasks in
// this order, and across streams a task waits for events of tasks ahead of it: whatever number of
// streams the hardware really has, the task that was issued first among those not done can run. So
// nothing deadlocks, and no wait is issued before the record that it is meant for.
//
// A task waits for
//   the copies that bring its inputs, or its inputs themselves where they come without a copy,
//   an F for the copies that leave the slot it takes over: what they send is the slot's to keep,
//   a copy for what it sends, and for the action that frees the slot it fills.
// Waits that follow from others are left out.
class StreamOrder {
   public:
    // Throws PlanError for a plan that cannot run.
    explicit StreamOrder(const LoweredPlan& lowered);

    const Plan& plan() const { return plan_; }
    int num_devices() const { return plan_.num_devices(); }
    int num_streams() const { return num_devices() + static_cast<int>(copy_streams_.size()); }
    // Stream num_devices() + i is copy_streams()[i].
    const std::vector<CopyStream>& copy_streams() const { return copy_streams_; }
    bool is_compute(const Task& task) const { return task.stream < num_devices(); }
    // The stream of a copy.
    const CopyStream& copy_stream(const Task& copy) const {
        return copy_streams_[static_cast<std::size_t>(copy.stream - num_devices())];
    }
    // The device that the stream belongs to.
    int device_of_stream(int stream) const;

    const std::vector<Task>& tasks() const { return tasks_; }
    std::span<const TaskNumber> waits(TaskNumber task) const {
        return {waits_.data() + wait_begin_[task], waits_.data() + wait_begin_[task + 1]};
    }
    // Slots of the stage in that replica.
    int num_slots(int replica, int stage) const { return slots_.num_slots(replica, stage); }
    int slot_of(Action action) const { return slots_.of(action); }

   private:
    Plan plan_;
    CellSlots slots_;
    std::vector<CopyStream> copy_streams_;
    std::vector<Task> tasks_;
    std::vector<std::size_t> wait_begin_;
    std::vector<TaskNumber> waits_;
};

}  // namespace pykern
