#include "cuda/device.hpp"

#include <array>
#include <stdexcept>

namespace pykern::cuda {

std::string driver_version() {
    int version = 0;
    driver::cuDriverGetVersion(&version);
    return release(version);
}

int device_count() {
    int count = 0;
    driver::cuDeviceGetCount(&count);
    return count;
}

CUdevice find_device(int device) {
    const int count = device_count();
    if (device < 0 || device >= count) {
        throw std::out_of_range("no device cuda:" + std::to_string(device) + ": the driver has " +
                                std::to_string(count) + (count == 1 ? " device" : " devices"));
    }
    CUdevice found = 0;
    driver::cuDeviceGet(&found, device);
    return found;
}

std::string device_name(int device) {
    std::array<char, 256> name{};
    driver::cuDeviceGetName(name.data(), static_cast<int>(name.size()), find_device(device));
    return name.data();
}

int num_sms(int device) {
    int count = 0;
    driver::cuDeviceGetAttribute(&count, kAttributeMultiprocessorCount, find_device(device));
    return count;
}

bool can_access_peer(int device, int peer) {
    int can = 0;
    driver::cuDeviceCanAccessPeer(&can, find_device(device), find_device(peer));
    return can != 0;
}

}  // namespace pykern::cuda
