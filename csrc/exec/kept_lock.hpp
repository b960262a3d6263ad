// The message for an interpreter lock that a call in C does not give back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exec/program.hpp"
#include "exec/workers.hpp"

namespace pykern {

// An action that a worker has not ended.
struct UnderWay {
    Position position;
    std::int64_t ns;          // for how long, as far as anybody has seen; 0: nobody has looked
    unsigned long thread_id;  // of the worker, as Python numbers its threads
};

// Says for how long the lock has been kept, which actions are under way, and what each other
// device waits for. `acting` has the longest first.
std::string tell_kept_lock(const Program& program, std::int64_t ns,
                           const std::vector<UnderWay>& acting,
                           const std::vector<Workers::Waiting>& rows);

}  // namespace pykern
