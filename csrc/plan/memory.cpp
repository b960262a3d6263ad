#include "plan/memory.hpp"

#include <algorithm>
#include <utility>

namespace pykern {

Memory::Memory(StageValues activation_bytes, StageValues kept_bytes, StageValues boundary_bytes,
               std::optional<StageValues> rebuilt_bytes)
    : activation_bytes_(std::move(activation_bytes)),
      kept_bytes_(std::move(kept_bytes)),
      boundary_bytes_(std::move(boundary_bytes)),
      rebuilt_bytes_(std::move(rebuilt_bytes).value_or(activation_bytes_)) {
    require_values("activation_bytes", activation_bytes_);
    require_values("kept_bytes", kept_bytes_);
    require_values("boundary_bytes", boundary_bytes_);
    require_values("rebuilt_bytes", rebuilt_bytes_);
}

void Memory::require_stages(int num_stages) const {
    pykern::require_stages("activation_bytes", activation_bytes_, num_stages);
    pykern::require_stages("kept_bytes", kept_bytes_, num_stages);
    pykern::require_stages("boundary_bytes", boundary_bytes_, num_stages);
    pykern::require_stages("rebuilt_bytes", rebuilt_bytes_, num_stages);
}

Held held_by(Action action, const Index& index, const Memory& memory) {
    const auto is_there = [&](Kind kind) { return index.at(with_kind(action, kind)) >= 0; };
    const bool recomputed = is_there(Kind::R);
    const double share = 1.0 / index.num_slices();
    const auto share_of = [&](const StageValues& bytes) {
        return value_of(bytes, action.stage) * share;
    };
    const double activation = share_of(memory.activation_bytes());
    const double kept = share_of(memory.kept_bytes());
    const double boundary = share_of(memory.boundary_bytes());
    const double waiting = recomputed ? boundary : activation;  // between F and what follows it
    const double whole = recomputed ? share_of(memory.rebuilt_bytes()) : activation;  // during B, I
    switch (action.kind) {
        case Kind::F: {
            const bool goes_back = is_there(Kind::B) || is_there(Kind::I);
            return {.at_start = waiting, .at_end = goes_back ? 0 : -waiting};
        }
        case Kind::LOAD:
            return {.at_start = waiting, .at_end = 0};
        case Kind::OFFLOAD:
            return {.at_start = 0, .at_end = -waiting};
        case Kind::R:
            return {.at_start = whole - boundary, .at_end = 0};
        case Kind::B:
            return {.at_start = 0, .at_end = -whole};
        case Kind::I:
            return {.at_start = 0, .at_end = kept - whole};
        case Kind::W:
            return {.at_start = 0, .at_end = -kept};
        default:
            return {.at_start = 0, .at_end = 0};
    }
}

std::vector<double> peak_bytes(const Plan& plan, const Memory& memory) {
    std::vector<double> peaks(plan.rows().size(), 0);
    for_each_held(plan, memory, [&](int device, std::size_t, double bytes) {
        double& peak = peaks[static_cast<std::size_t>(device)];
        peak = std::max(peak, bytes);
    });
    return peaks;
}

}  // namespace pykern
