// Copies move bytes of this process, at the moment that they run.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "schedule.hpp"

namespace pykern::fake {

inline std::byte* bytes_at(cuda::CUdeviceptr address) { return std::bit_cast<std::byte*>(address); }

inline Work copy_work(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes) {
    Work work;
    work.run = [=] { std::memmove(bytes_at(to), bytes_at(from), bytes); };
    work.accesses = {{from, bytes, 0}, {to, bytes, 1}};
    return work;
}

}  // namespace pykern::fake
