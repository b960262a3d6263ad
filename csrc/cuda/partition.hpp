// One GPU as several devices: groups of its multiprocessors (SMs), each with streams of its own.
#pragma once

#include <vector>

#include "cuda/objects.hpp"

namespace pykern::cuda {

// SMs that no other group of the partition has.
class Group {
   public:
    Group(GreenContext green, unsigned num_sms);

    unsigned num_sms() const { return num_sms_; }

    // The context of events for the streams. The driver lets one thread at a time have it current.
    CUcontext context() const { return context_; }

    // Kernels of this stream run on the group's SMs. Must be gone before the partition is.
    Stream make_stream(int priority = 0) const;

   private:
    GreenContext green_;
    CUcontext context_ = nullptr;
    unsigned num_sms_;
};

// As many groups of one size as asked for, all from one split: groups of two splits would overlap.
// SMs that do not fill one more group's share are left unused. L2, memory bandwidth and copy
// engines stay common to all.
class Partition {
   public:
    // Throws std::invalid_argument where so many groups do not fit, before anything is made.
    Partition(int device, unsigned num_groups);

    int device() const { return primary_.device(); }
    const std::vector<Group>& groups() const { return groups_; }

   private:
    Partition(int device, const std::vector<DevResource>& groups);

    PrimaryContext primary_;
    std::vector<Group> groups_;
};

}  // namespace pykern::cuda
