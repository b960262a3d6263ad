// Memory of devices is memory of this process.
#pragma once

#include <bit>
#include <cstddef>

#include "cuda/api.hpp"

namespace pykern::fake {

inline std::byte* bytes_at(cuda::CUdeviceptr address) { return std::bit_cast<std::byte*>(address); }

}  // namespace pykern::fake
