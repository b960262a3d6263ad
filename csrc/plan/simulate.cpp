#include "plan/simulate.hpp"

#include <utility>

#include "plan/clock.hpp"

namespace pykern {

Timeline simulate(const Plan& plan, const Costs& costs) {
    return Timeline(run_clock(plan, costs).clock.take_rows());
}

}  // namespace pykern
