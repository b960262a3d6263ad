// The report of a stalled step of streams: who waits for whom.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "exec/step_marks.hpp"

namespace pykern {

// Lines without a last line break. The first names what has not ended for the longest time; then
// there is one for each thing at work, for each stream that waits, and for the thread that issues.
// `num_behind` steps are issued behind this one.
std::string tell_stall(const StepMarks& step, std::size_t num_behind, std::int64_t now);

}  // namespace pykern
