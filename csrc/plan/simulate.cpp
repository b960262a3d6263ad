#include "plan/simulate.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "plan/check.hpp"
#include "plan/index.hpp"
#include "plan/inputs.hpp"
#include "plan/order.hpp"

namespace pykern {

Timeline simulate(const Plan& plan, const Costs& costs) {
    check(plan);
    costs.require_stages(plan.num_stages());
    const Index index(plan);
    std::vector<std::vector<Span>> rows(plan.rows().size());
    std::vector<double> end_ns(plan.num_actions());
    for (const Action& action : run_order(plan, index)) {
        const int device = plan.device_of(action);
        std::vector<Span>& row = rows[static_cast<std::size_t>(device)];
        double start_ns = row.empty() ? 0 : row.back().end_ns;
        for_each_input(action, index, [&](Action input, int position) {
            const bool moves = plan.device_of(input) != device;
            start_ns = std::max(start_ns, end_ns[static_cast<std::size_t>(position)] +
                                              (moves ? costs.transfer_ns() : 0));
        });
        row.push_back({action, start_ns, start_ns + costs.of(action)});
        end_ns[static_cast<std::size_t>(index.at(action))] = row.back().end_ns;
    }
    return Timeline(std::move(rows));
}

}  // namespace pykern
