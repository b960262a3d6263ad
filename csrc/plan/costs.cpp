#include "plan/costs.hpp"

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

void require(bool holds, const std::string& name, const char* rule, double value) {
    if (holds) return;
    throw std::invalid_argument(name + " must be " + rule + ", got " + std::to_string(value));
}

void require_speed(const std::string& name, double speed) {
    require(std::isfinite(speed) && speed > 0, name, "finite and positive", speed);
}

void require_speeds(const StageValues& speeds) {
    if (const auto* speed = std::get_if<double>(&speeds)) {
        return require_speed("device_speeds", *speed);
    }
    const auto& list = std::get<std::vector<double>>(speeds);
    for (std::size_t device = 0; device < list.size(); ++device) {
        require_speed("device_speeds of device " + std::to_string(device), list[device]);
    }
}

// Calls visit(name, values) for everything of a complete table that is given by stage.
template <class Visit>
void for_each_stage_values(const CostTable& table, Visit visit) {
    visit("forward_ns", table.forward_ns);
    visit("backward_ns", table.backward_ns);
    visit("recompute_ns", *table.recompute_ns);
    visit("input_ns", *table.input_ns);
    visit("weight_ns", *table.weight_ns);
    visit("update_ns", table.update_ns);
    visit("reduce_ns", table.reduce_ns);
    visit("message_bytes", table.message_bytes);
}

}  // namespace

Costs::Costs(CostTable table) : table_(std::move(table)) {
    if (!table_.recompute_ns) table_.recompute_ns = table_.forward_ns;
    if (!table_.input_ns) table_.input_ns = half_of(table_.backward_ns);
    if (!table_.weight_ns) table_.weight_ns = half_of(table_.backward_ns);
    for_each_stage_values(
        table_, [](const char* name, const StageValues& values) { require_values(name, values); });
    require_values("transfer_ns", table_.transfer_ns);
    require_values("overhead_ns", table_.overhead_ns);
    require(table_.bandwidth > 0, "bandwidth", "positive", table_.bandwidth);
    require(table_.overlap >= 0 && table_.overlap <= 1, "overlap", "0 to 1", table_.overlap);
    require_speeds(table_.device_speeds);
}

Costs::Costs(StageValues forward_ns, StageValues backward_ns, double transfer_ns,
             std::optional<StageValues> input_ns, std::optional<StageValues> weight_ns)
    : Costs(CostTable{.forward_ns = std::move(forward_ns),
                      .backward_ns = std::move(backward_ns),
                      .transfer_ns = transfer_ns,
                      .input_ns = std::move(input_ns),
                      .weight_ns = std::move(weight_ns)}) {}

double Costs::of(Kind kind, std::size_t stage) const {
    switch (kind) {
        case Kind::F:
            return value_of(table_.forward_ns, stage);
        case Kind::R:
            return value_of(*table_.recompute_ns, stage);
        case Kind::B:
            return value_of(table_.backward_ns, stage);
        case Kind::I:
            return value_of(*table_.input_ns, stage);
        case Kind::W:
            return value_of(*table_.weight_ns, stage);
        case Kind::U:
            return value_of(table_.update_ns, stage);
        case Kind::REDUCE:
            return value_of(table_.reduce_ns, stage);
        default:
            return 0;
    }
}

void Costs::require_fits(int num_stages, int num_devices) const {
    for_each_stage_values(table_, [num_stages](const char* name, const StageValues& values) {
        require_stages(name, values, num_stages);
    });
    const auto* speeds = std::get_if<std::vector<double>>(&table_.device_speeds);
    if (speeds == nullptr || speeds->size() == static_cast<std::size_t>(num_devices)) return;
    throw std::invalid_argument("device_speeds must hold one value for each of " +
                                std::to_string(num_devices) + " devices, got " +
                                std::to_string(speeds->size()));
}

}  // namespace pykern
