#include "cuda/partition.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/device.hpp"

namespace pykern::cuda {

namespace {

[[noreturn]] void refuse(int device, unsigned num_groups, const std::string& why) {
    throw std::invalid_argument("cuda:" + std::to_string(device) + " cannot be split into " +
                                std::to_string(num_groups) + " groups: " + why);
}

std::string granularity(const DevResource& whole) {
    return "its " + std::to_string(whole.sm.smCount) + " SMs come in groups of " +
           std::to_string(whole.sm.minSmPartitionSize) + " or more, in multiples of " +
           std::to_string(whole.sm.smCoscheduledAlignment);
}

// The most SMs that each of so many groups can have.
unsigned sms_per_group(const DevResource& whole, int device, unsigned num_groups) {
    const unsigned step = whole.sm.smCoscheduledAlignment;
    if (step == 0) refuse(device, num_groups, "drivers before 13.0 do not tell what fits");
    const unsigned share = num_groups == 0 ? 0 : whole.sm.smCount / num_groups / step * step;
    if (share < std::max(whole.sm.minSmPartitionSize, 1U)) {
        refuse(device, num_groups, granularity(whole));
    }
    return share;
}

std::vector<DevResource> split(int device, unsigned num_groups) {
    DevResource whole{};
    driver::cuDeviceGetDevResource(find_device(device), &whole, kResourceTypeSm);
    const unsigned share = sms_per_group(whole, device, num_groups);
    std::vector<DevResource> groups(num_groups);
    unsigned num_made = num_groups;
    driver::cuDevSmResourceSplitByCount(groups.data(), &num_made, &whole, nullptr, 0, share);
    // Fewer than the arithmetic says, where clusters of SMs do not divide evenly.
    if (num_made < num_groups) {
        refuse(device, num_groups,
               granularity(whole) + ", and the driver makes only " + std::to_string(num_made) +
                   " of " + std::to_string(share));
    }
    return groups;
}

Group make_group(const PrimaryContext& primary, DevResource sms) {
    CUdevResourceDesc description = nullptr;
    driver::cuDevResourceGenerateDesc(&description, &sms, 1);
    CUgreenCtx green = nullptr;
    driver::cuGreenCtxCreate(&green, description, find_device(primary.device()),
                             kGreenCtxDefaultStream);
    return {GreenContext(green, {primary.get()}), sms.sm.smCount};
}

}  // namespace

Group::Group(GreenContext green, unsigned num_sms) : green_(std::move(green)), num_sms_(num_sms) {
    driver::cuCtxFromGreenCtx(&context_, green_.get());
}

Stream Group::make_stream(int priority) const {
    CUstream stream = nullptr;
    driver::cuGreenCtxStreamCreate(&stream, green_.get(), kStreamNonBlocking, priority);
    // Ended under the device's primary context: the group's may be current on another thread.
    return Stream(stream, {green_.get_deleter().context});
}

Partition::Partition(int device, unsigned num_groups)
    : Partition(device, split(device, num_groups)) {}

Partition::Partition(int device, const std::vector<DevResource>& groups) : primary_(device) {
    groups_.reserve(groups.size());
    for (const DevResource& sms : groups) groups_.push_back(make_group(primary_, sms));
}

}  // namespace pykern::cuda
