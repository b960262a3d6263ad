// Placement: which device computes which stage.
#pragma once

#include <cstddef>
#include <vector>

namespace pykern {

// What an Action's stage number can hold.
inline constexpr int kMaxStages = 65536;

// Invariant: at least one device and one stage, every stage on a device in [0, num_devices), at
// most kMaxStages of either.
class Placement {
   public:
    Placement(int num_devices, std::vector<int> device_of_stage);

    // Stage s on device s.
    static Placement linear(int num_devices);
    // Stage s on device s mod P: every chunk goes the same way round.
    static Placement looped(int num_devices, int num_chunks);
    // Stages run down the devices and back up, `waves` times (Hanayo, 2 * waves chunks a device).
    static Placement wave(int num_devices, int waves);

    int num_devices() const { return num_devices_; }
    int num_stages() const { return static_cast<int>(device_of_stage_.size()); }
    int device_of(int stage) const { return device_of_stage_[static_cast<std::size_t>(stage)]; }
    const std::vector<int>& device_of_stage() const { return device_of_stage_; }

    friend bool operator==(const Placement&, const Placement&) = default;

   private:
    int num_devices_;
    std::vector<int> device_of_stage_;
};

}  // namespace pykern
