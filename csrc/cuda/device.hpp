// Facts about devices from the driver, and which of them may reach each other's memory.
#pragma once

#include <string>

#include "cuda/objects.hpp"

namespace pykern::cuda {

// The newest CUDA release that the driver serves, such as "13.0".
std::string driver_version();

int device_count();

// Devices have the numbers that torch gives them. Throws std::out_of_range for one that is not
// there, as do all below.
CUdevice find_device(int device);

std::string device_name(int device);
int num_sms(int device);
bool can_access_peer(int device, int peer);

}  // namespace pykern::cuda
