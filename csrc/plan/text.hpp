// Text: how actions and plans are written. An action is torch's "2F0": stage, kind, microbatch;
// the second slice of it is "2F0.1".
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "plan/action.hpp"
#include "plan/plan.hpp"

namespace pykern {

const char* kind_name(Kind kind);

std::string to_text(Action action);

// The action that `text` writes in full and in the one form to_text gives; else
// std::invalid_argument.
Action parse_action(std::string_view text);

// One line per device.
std::string table(const Plan& plan);

// The part of the table around one place, with an arrow under it. `position` may be the row's end.
std::string table_at(const Plan& plan, int device, std::size_t position);

}  // namespace pykern
