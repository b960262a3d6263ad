// Shades: which replica and which chunk each action of a timeline belongs to. A timeline does not
// say where its stages were placed, but it shows it.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "plan/timeline.hpp"

namespace pykern {

// Microbatches whose stages run on the same devices are of one replica; replicas count in the order
// of their first microbatch. A chunk is one of several stages that a device has of one replica,
// counted from the input.
class Shades {
   public:
    explicit Shades(const Timeline& timeline);

    int num_replicas() const { return num_replicas_; }
    int num_chunks() const { return num_chunks_; }
    int num_shades() const { return num_replicas_ * num_chunks_; }
    // From 0, the lightest. Throws std::out_of_range for an action that the device does not have.
    int shade_of(int device, Action action) const;

   private:
    struct Place {
        int device = 0;
        std::uint16_t stage = 0;

        friend auto operator<=>(const Place&, const Place&) = default;
    };
    struct Chunk {
        Place place;
        int number = 0;
    };

    void add_replica(const std::vector<Place>& places);

    std::unordered_map<std::uint32_t, std::size_t> replica_of_;
    // By replica, in the order of their places.
    std::vector<std::vector<Chunk>> chunks_;
    int num_replicas_ = 1;
    int num_chunks_ = 1;
};

}  // namespace pykern
