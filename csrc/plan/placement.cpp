#include "plan/placement.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "plan/require.hpp"

namespace pykern {

namespace {

// How many stages `chunks` passes over the devices make; refused before anything is allocated.
int count_stages(int num_devices, const char* chunks_name, int chunks, int stages_per_chunk) {
    require_range("num_devices", num_devices, 1, kMaxStages);
    require_range(chunks_name, chunks, 1, kMaxStages);
    const std::int64_t stages = std::int64_t{num_devices} * chunks * stages_per_chunk;
    require_range("num_stages", stages, 1, kMaxStages);
    return static_cast<int>(stages);
}

void require_device(int stage, int device, int num_devices) {
    if (device >= 0 && device < num_devices) return;
    throw std::invalid_argument("devices of stages must be 0 to " +
                                std::to_string(num_devices - 1) + ", got " +
                                std::to_string(device) + " for stage " + std::to_string(stage));
}

}  // namespace

Placement::Placement(int num_devices, Replica device_of_stage)
    : Placement(num_devices, std::vector<Replica>{std::move(device_of_stage)}) {}

Placement::Placement(int num_devices, std::vector<Replica> replicas)
    : num_devices_(num_devices), replicas_(std::move(replicas)) {
    require_range("num_devices", num_devices_, 1, kMaxStages);
    require_range("num_replicas", static_cast<std::int64_t>(replicas_.size()), 1, kMaxStages);
    require_range("num_stages", static_cast<std::int64_t>(replicas_[0].size()), 1, kMaxStages);
    for (const Replica& replica : replicas_) {
        require_range("num_stages of a replica", static_cast<std::int64_t>(replica.size()),
                      num_stages(), num_stages());
        for (int stage = 0; stage < num_stages(); ++stage) {
            require_device(stage, replica[static_cast<std::size_t>(stage)], num_devices_);
        }
    }
}

Placement Placement::linear(int num_devices) { return looped(num_devices, 1); }

Placement Placement::looped(int num_devices, int num_chunks) {
    const int num_stages = count_stages(num_devices, "num_chunks", num_chunks, 1);
    Replica devices;
    devices.reserve(static_cast<std::size_t>(num_stages));
    for (int stage = 0; stage < num_stages; ++stage) devices.push_back(stage % num_devices);
    return {num_devices, std::move(devices)};
}

Placement Placement::wave(int num_devices, int waves) {
    const int num_stages = count_stages(num_devices, "waves", waves, 2);
    Replica devices;
    for (int stage = 0; stage < num_stages; ++stage) {
        const int offset = stage % num_devices;
        const bool down = (stage / num_devices) % 2 == 0;
        devices.push_back(down ? offset : num_devices - 1 - offset);
    }
    return {num_devices, std::move(devices)};
}

Placement Placement::bidirectional(int num_devices) {
    const Replica down = linear(num_devices).replicas_[0];
    return {num_devices, std::vector<Replica>{down, Replica(down.rbegin(), down.rend())}};
}

std::vector<std::vector<int>> Placement::stages_by_device() const {
    std::vector<std::vector<int>> stages(static_cast<std::size_t>(num_devices_));
    for (int stage = 0; stage < num_stages(); ++stage) {
        stages[static_cast<std::size_t>(device_of(stage))].push_back(stage);
    }
    return stages;
}

}  // namespace pykern
