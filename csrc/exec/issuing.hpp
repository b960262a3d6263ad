// Issuing: a job's tasks as a program for threads, one for each lane.
#pragma once

#include <vector>

#include "exec/stream_job.hpp"
#include "exec/workers.hpp"

namespace pykern {

// The thread of a lane issues the lane's actions, in their order. A copy is issued by the thread
// that has issued the last task that it waits for, behind the copies before it on its stream. So a
// task is issued behind all tasks that its stream is ordered after, as by one thread, and nothing
// waits in a circle: the order of the job respects every such wait.
//
// Waits that follow from others (stream_order.hpp) follow on the host as well, since a thread or
// copy stream issues in order.
class IssuingProgram {
   public:
    explicit IssuingProgram(const StreamJob& job);

    WorkerProgram& program() { return program_; }
    const WorkerProgram& program() const { return program_; }
    TaskNumber task(Position position) const { return task_of_[position]; }
    Position position(TaskNumber task) const { return position_of_[task]; }

   private:
    Program made(const StreamJob& job);

    std::vector<TaskNumber> task_of_;
    std::vector<Position> position_of_;
    WorkerProgram program_;
};

}  // namespace pykern
