// Costs: how long each action takes, as the simulator is told.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <optional>

#include "plan/action.hpp"
#include "plan/stage_values.hpp"

namespace pykern {

// Costs of one action, in nanoseconds on a device of speed 1. By default R takes what F takes, and
// each half of a backward takes half of it. NaN is a time that is not known, such as that of a
// kind of action that did not run in the step that was measured.
struct CostTable {
    StageValues forward_ns;
    StageValues backward_ns;
    // From the end on one device to the earliest start on another; it blocks neither.
    double transfer_ns = 0;
    std::optional<StageValues> recompute_ns = std::nullopt;
    std::optional<StageValues> input_ns = std::nullopt;
    std::optional<StageValues> weight_ns = std::nullopt;
    StageValues update_ns = 0.0;
    StageValues reduce_ns = 0.0;
    // Every action keeps its device busy for so much more, whatever the device's speed.
    double overhead_ns = 0;
    // Bytes that cross the boundary behind a stage, either way, at so many bytes per ns.
    StageValues message_bytes = 0.0;
    double bandwidth = std::numeric_limits<double>::infinity();
    // Whether the messages from one device to another go one after the other, in the order of the
    // sender's row, instead of each at full bandwidth.
    bool shared_links = false;
    // How much of the shorter action of an overlapped pair hides behind the longer: 0...1.
    double overlap = 0;
    // One number for every device, or one for each; twice the speed is half the time.
    StageValues device_speeds = 1.0;

    friend bool operator==(const CostTable&, const CostTable&) = default;
};

// Invariant: times are finite and not negative or, of a kind of action, NaN; sizes are finite and
// not negative, speeds finite and positive, bandwidth is positive, overlap 0...1, and every
// optional of the table is there.
class Costs {
   public:
    explicit Costs(CostTable table);
    Costs(StageValues forward_ns, StageValues backward_ns, double transfer_ns = 0,
          std::optional<StageValues> input_ns = {}, std::optional<StageValues> weight_ns = {});

    const CostTable& table() const { return table_; }

    // Time of a kind on a stage, without overhead, on a device of speed 1; NaN where it is not
    // known. OFFLOAD and LOAD take no time.
    double of(Kind kind, std::size_t stage) const {
        return value_of(times_ns_[of_kind(kind)], stage);
    }
    // How long a message over the boundary behind a stage holds its link.
    double message_ns(std::size_t stage) const {
        return value_of(table_.message_bytes, stage) / table_.bandwidth;
    }
    // Throws std::invalid_argument where the time of a kind on a stage is not known, and says how
    // to measure it.
    void require_known(Kind kind, int stage) const;
    // Throws std::invalid_argument where a list has another length.
    void require_fits(int num_stages, int num_devices) const;

    // Times that neither knows are equal.
    friend bool operator==(const Costs& one, const Costs& other);

   private:
    static std::size_t of_kind(Kind kind) { return static_cast<std::size_t>(kind); }
    // Calls visit(name, values) for everything that is given by stage.
    template <class Visit>
    void for_each_stage_values(Visit visit) const;

    CostTable table_;
    std::array<StageValues, kNumKinds> times_ns_;
};

}  // namespace pykern
