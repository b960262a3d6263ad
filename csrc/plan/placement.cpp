#include "plan/placement.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace pykern {

namespace {

void require_positive(const char* name, int value) {
    if (value < 1) {
        throw std::invalid_argument(std::string(name) + " must be at least 1, got " +
                                    std::to_string(value));
    }
}

}  // namespace

Placement::Placement(int num_devices, std::vector<int> device_of_stage)
    : num_devices_(num_devices), device_of_stage_(std::move(device_of_stage)) {
    require_positive("num_devices", num_devices_);
    require_positive("num_stages", num_stages());
    for (int stage = 0; stage < num_stages(); ++stage) {
        const int device = device_of(stage);
        if (device < 0 || device >= num_devices_) {
            throw std::invalid_argument("stage " + std::to_string(stage) + " is placed on device " +
                                        std::to_string(device) + ", but devices are 0 to " +
                                        std::to_string(num_devices_ - 1));
        }
    }
}

Placement Placement::linear(int num_devices) { return looped(num_devices, 1); }

Placement Placement::looped(int num_devices, int num_chunks) {
    require_positive("num_devices", num_devices);
    require_positive("num_chunks", num_chunks);
    std::vector<int> devices;
    for (int stage = 0; stage < num_devices * num_chunks; ++stage) {
        devices.push_back(stage % num_devices);
    }
    return {num_devices, std::move(devices)};
}

Placement Placement::wave(int num_devices, int waves) {
    require_positive("num_devices", num_devices);
    require_positive("waves", waves);
    std::vector<int> devices;
    for (int stage = 0; stage < 2 * waves * num_devices; ++stage) {
        const int offset = stage % num_devices;
        const bool down = (stage / num_devices) % 2 == 0;
        devices.push_back(down ? offset : num_devices - 1 - offset);
    }
    return {num_devices, std::move(devices)};
}

}  // namespace pykern
