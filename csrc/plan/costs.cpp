#include "plan/costs.hpp"

#include <utility>

namespace pykern {

namespace {

StageValues half_of(StageValues values) {
    if (auto* value = std::get_if<double>(&values)) {
        *value /= 2;
    } else {
        for (double& entry : std::get<std::vector<double>>(values)) entry /= 2;
    }
    return values;
}

}  // namespace

Costs::Costs(StageValues forward_ns, StageValues backward_ns, double transfer_ns,
             std::optional<StageValues> input_ns, std::optional<StageValues> weight_ns)
    : forward_ns_(std::move(forward_ns)),
      backward_ns_(std::move(backward_ns)),
      input_ns_(input_ns ? std::move(*input_ns) : half_of(backward_ns_)),
      weight_ns_(weight_ns ? std::move(*weight_ns) : half_of(backward_ns_)),
      transfer_ns_(transfer_ns) {
    require_values("forward_ns", forward_ns_);
    require_values("backward_ns", backward_ns_);
    require_values("input_ns", input_ns_);
    require_values("weight_ns", weight_ns_);
    require_values("transfer_ns", transfer_ns_);
}

double Costs::of(Action action) const {
    switch (action.kind) {
        case Kind::F:
        case Kind::R:
            return value_of(forward_ns_, action.stage);
        case Kind::B:
            return value_of(backward_ns_, action.stage);
        case Kind::I:
            return value_of(input_ns_, action.stage);
        case Kind::W:
            return value_of(weight_ns_, action.stage);
        default:
            return 0;
    }
}

void Costs::require_stages(int num_stages) const {
    pykern::require_stages("forward_ns", forward_ns_, num_stages);
    pykern::require_stages("backward_ns", backward_ns_, num_stages);
    pykern::require_stages("input_ns", input_ns_, num_stages);
    pykern::require_stages("weight_ns", weight_ns_, num_stages);
}

}  // namespace pykern
