// Placement: which device computes which stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pykern {

// The range of an Action's stage number.
inline constexpr int kMaxStages = 65536;

// The devices of one copy of the model, by stage.
using Replica = std::vector<int>;

// Invariant: at least one device, one replica and one stage, every stage on a device in
// [0, num_devices), at most kMaxStages of each. All replicas have the same stages.
class Placement {
   public:
    Placement(int num_devices, Replica device_of_stage);
    Placement(int num_devices, std::vector<Replica> replicas);

    // Stage s on device s.
    static Placement linear(int num_devices);
    // Stage s on device s mod P: every chunk goes the same way round.
    static Placement looped(int num_devices, int num_chunks);
    // Stages run down the devices and back up, `waves` times (Hanayo, 2 * waves chunks a device).
    static Placement wave(int num_devices, int waves);
    // Two replicas: stage s on device s, and on device P-1-s (Chimera).
    static Placement bidirectional(int num_devices);

    int num_devices() const { return num_devices_; }
    int num_stages() const { return static_cast<int>(replicas_[0].size()); }
    int num_replicas() const { return static_cast<int>(replicas_.size()); }
    const std::vector<Replica>& replicas() const { return replicas_; }
    int device_of(int stage, int replica = 0) const {
        return replicas_[static_cast<std::size_t>(replica)][static_cast<std::size_t>(stage)];
    }
    // The chunks of each device in the first replica, ascending.
    std::vector<std::vector<int>> stages_by_device() const;
    // Microbatches are dealt to the replicas in turn.
    int replica_of(std::uint32_t microbatch) const {
        const auto num = static_cast<std::uint32_t>(replicas_.size());
        return num == 1 ? 0 : static_cast<int>(microbatch % num);
    }

    friend bool operator==(const Placement&, const Placement&) = default;

   private:
    int num_devices_;
    std::vector<Replica> replicas_;
};

}  // namespace pykern
