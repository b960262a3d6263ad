#include "exec/short_step.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "exec/ranges.hpp"

namespace pykern {

bool is_short(const WorkerProgram& job) {
    const Program& program = job.program;
    if (program.num_devices() > 1 || program.is_endless() || program.is_issuing()) return false;
    std::int64_t left = std::chrono::nanoseconds(kInterruptTick).count();
    for (Position position = 0; position < program.num_actions() && left > 0; ++position) {
        // An action that has not run yet counts as longer than any step.
        left -= std::min(left, job.pace.expected_ns(program.action(position)));
    }
    return left > 0;
}

void run_short(WorkerProgram& job, Client& client, const Workers& workers) {
    if (workers.closed()) return;
    const Range range = Range::of_step();
    job.trace.begin();
    bool ok = client.enter(0);
    // The row of the one device is an order in which each action follows its inputs.
    for (Position position = 0; ok && position < job.program.num_actions(); ++position) {
        ok = !workers.closed() && run_timed(job, client, 0, position);
    }
    client.leave(0);
    job.trace.end();
}

}  // namespace pykern
