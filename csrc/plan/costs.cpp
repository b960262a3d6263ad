#include "plan/costs.hpp"

#include <algorithm>
#include <array>
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

// A kind of action that has a time: what the time is called, and which step it is measured in.
struct TimeOfKind {
    Kind kind;
    const char* letter;
    const char* name;
    const char* measured_in;
};

constexpr std::array kTimesOfKinds{
    TimeOfKind{Kind::F, "F", "forward_ns", "of any schedule"},
    TimeOfKind{Kind::B, "B", "backward_ns", "of a schedule with backwards"},
    TimeOfKind{Kind::R, "R", "recompute_ns", "with recompute"},
    TimeOfKind{Kind::I, "I", "input_ns", "of a schedule with a split backward, such as zb_h1"},
    TimeOfKind{Kind::W, "W", "weight_ns", "of a schedule with a split backward, such as zb_h1"},
    TimeOfKind{Kind::U, "U", "update_ns", "of a pykern.AsyncPipeline"},
    TimeOfKind{Kind::REDUCE, "REDUCE", "reduce_ns", "with replicas or a process_group"},
};

// With another value for what is not known.
StageValues without_unknown(StageValues values, double instead) {
    const auto replace = [instead](double& value) {
        if (std::isnan(value)) value = instead;
    };
    if (auto* value = std::get_if<double>(&values)) {
        replace(*value);
    } else {
        std::ranges::for_each(std::get<std::vector<double>>(values), replace);
    }
    return values;
}

// NaN is not equal to itself, and no time is -1.
CostTable comparable(CostTable table) {
    const auto replace = [](StageValues& values) {
        values = without_unknown(std::move(values), -1);
    };
    for (StageValues* values :
         {&table.forward_ns, &table.backward_ns, &table.update_ns, &table.reduce_ns}) {
        replace(*values);
    }
    for (auto* values : {&table.recompute_ns, &table.input_ns, &table.weight_ns}) {
        if (values->has_value()) replace(values->value());
    }
    return table;
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
        require_speed("device_speeds", *speed);
        return;
    }
    const auto& list = std::get<std::vector<double>>(speeds);
    for (std::size_t device = 0; device < list.size(); ++device) {
        require_speed("device_speeds of device " + std::to_string(device), list[device]);
    }
}

}  // namespace

template <class Visit>
void Costs::for_each_stage_values(Visit visit) const {
    for (const TimeOfKind& time : kTimesOfKinds) visit(time.name, times_ns_[of_kind(time.kind)]);
    visit("message_bytes", table_.message_bytes);
}

Costs::Costs(CostTable table) : table_(std::move(table)) {
    const StageValues half = half_of(table_.backward_ns);
    times_ns_[of_kind(Kind::F)] = table_.forward_ns;
    times_ns_[of_kind(Kind::B)] = table_.backward_ns;
    times_ns_[of_kind(Kind::R)] = table_.recompute_ns.value_or(table_.forward_ns);
    times_ns_[of_kind(Kind::I)] = table_.input_ns.value_or(half);
    times_ns_[of_kind(Kind::W)] = table_.weight_ns.value_or(half);
    times_ns_[of_kind(Kind::U)] = table_.update_ns;
    times_ns_[of_kind(Kind::REDUCE)] = table_.reduce_ns;
    table_.recompute_ns = times_ns_[of_kind(Kind::R)];
    table_.input_ns = times_ns_[of_kind(Kind::I)];
    table_.weight_ns = times_ns_[of_kind(Kind::W)];
    for (const TimeOfKind& time : kTimesOfKinds) {
        require_values(time.name, without_unknown(times_ns_[of_kind(time.kind)], 0));
    }
    require_values("message_bytes", table_.message_bytes);
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

bool operator==(const Costs& one, const Costs& other) {
    return comparable(one.table_) == comparable(other.table_);
}

void Costs::require_known(Kind kind, int stage) const {
    if (!std::isnan(of(kind, static_cast<std::size_t>(stage)))) return;
    const auto* time = std::ranges::find(kTimesOfKinds, kind, &TimeOfKind::kind);
    throw std::invalid_argument(std::string(time->name) + " of stage " + std::to_string(stage) +
                                " must be known for a plan with " + time->letter +
                                ", got nan. pipe.costs() knows it after a step " +
                                time->measured_in);
}

void Costs::require_fits(int num_stages, int num_devices) const {
    for_each_stage_values([num_stages](const char* name, const StageValues& values) {
        require_stages(name, values, num_stages);
    });
    const auto* speeds = std::get_if<std::vector<double>>(&table_.device_speeds);
    if (speeds == nullptr || speeds->size() == static_cast<std::size_t>(num_devices)) return;
    throw std::invalid_argument("device_speeds must hold one value for each of " +
                                std::to_string(num_devices) + " devices, got " +
                                std::to_string(speeds->size()));
}

}  // namespace pykern
