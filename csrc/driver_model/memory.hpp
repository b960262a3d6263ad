// Access to bytes: races between streams, and the life of allocations.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "driver_model/fake.hpp"
#include "driver_model/order.hpp"
#include "driver_model/schedule.hpp"
#include "driver_model/violations.hpp"

namespace pykern::fake {

// Work by the name of the function that issued it.
struct Site {
    const char* function = nullptr;
    Point point;
    int device = 0;
};

std::string text_of(const Site& site);

class Memory {
   public:
    explicit Memory(Violations& violations) : violations_(violations) {}

    void allow_undeclared(bool allowed) { undeclared_allowed_ = allowed; }
    void allocate(cuda::CUdeviceptr address, std::size_t bytes,
                  std::shared_ptr<const Stream> owner);
    void place_on_host(cuda::CUdeviceptr address, bool pinned) {
        allocations_.at(address).on_host = true;
        allocations_.at(address).pageable = !pinned;
    }
    bool is_allocated(cuda::CUdeviceptr address) const;
    bool is_freed(cuda::CUdeviceptr address) const;
    // The size of the allocation that starts there.
    std::size_t bytes_at(cuda::CUdeviceptr address) const;
    // The number of the stream that owns it.
    std::size_t owner_of(cuda::CUdeviceptr address) const;
    // host is what the host knows to be done.
    void free(cuda::CUdeviceptr address, const Clock& host);
    // The address means other memory from now on, of which nothing is known.
    void forget(cuda::CUdeviceptr address);
    void touch(const Site& site, const Clock& clock, const FakeAccess& access);
    // Whether the host may move it: devices reach it by a copy of the driver's own alone.
    bool is_pageable(cuda::CUdeviceptr address) const;
    // The device of memory that is allocated, but on the host.
    std::optional<int> device_of(cuda::CUdeviceptr address) const;

   private:
    // Bytes with one history. Reads are those since the write that are not ordered among each
    // other; older accesses are ordered before these, or were told as a race.
    struct Piece {
        cuda::CUdeviceptr end = 0;
        std::optional<Site> write;
        std::vector<Site> reads;
    };
    struct Allocation {
        std::size_t bytes = 0;
        std::shared_ptr<const Stream> owner;
        bool freed = false;
        bool on_host = false;
        bool pageable = false;
    };
    using Pieces = std::map<cuda::CUdeviceptr, Piece>;
    using Allocations = std::map<cuda::CUdeviceptr, Allocation>;

    void check_life(const Site& site, const FakeAccess& access);
    Allocations::const_iterator overlapping(cuda::CUdeviceptr address, std::size_t bytes) const;
    Pieces::iterator cut_at(cuda::CUdeviceptr address);
    // Covers [address, end) with pieces, none of which reaches beyond.
    Pieces::iterator cover(cuda::CUdeviceptr address, cuda::CUdeviceptr end);

    Violations& violations_;
    Pieces pieces_;
    Allocations allocations_;
    bool undeclared_allowed_ = false;
};

}  // namespace pykern::fake
