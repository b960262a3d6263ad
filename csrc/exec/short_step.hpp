// Short step: all actions of one device on the thread that called the step.
#pragma once

#include "exec/workers.hpp"

namespace pykern {

// Whether one device has all actions of the job, and they are expected to end before the caller of
// `Workers::run` would ask for interrupts for the first time. That thread has nothing else to do,
// and two wake-ups of threads would be a part of the step.
bool is_short(const WorkerProgram& job);

// The same as `Workers::run` for such a job, on the calling thread, which holds the lock that
// `resume` takes. Nobody is asked for interrupts: the actions notice them. Ends behind an action
// that fails or during which the workers begin to close, and does nothing if they are closed. The
// workers must rest.
void run_short(WorkerProgram& job, Client& client, const Workers& workers);

}  // namespace pykern
