#include "plan/action.hpp"

#include <limits>

#include "plan/require.hpp"

namespace pykern {

Action make_action(Kind kind, std::int64_t stage, std::int64_t microbatch, std::int64_t slice) {
    require_range("stage", stage, 0, std::numeric_limits<std::uint16_t>::max());
    require_range("microbatch", microbatch, 0, std::numeric_limits<std::uint32_t>::max());
    require_range("slice", slice, 0, std::numeric_limits<std::uint8_t>::max());
    return {static_cast<std::uint32_t>(microbatch), static_cast<std::uint16_t>(stage), kind,
            static_cast<std::uint8_t>(slice)};
}

}  // namespace pykern
