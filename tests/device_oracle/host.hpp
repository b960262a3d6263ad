// Memory of the host, pinned or not, and copies between it and GPUs, which the fake driver makes.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "capture.hpp"

namespace oracle {

// torch hands a block out again once the copies that use it have ended: no block comes back within
// a test.
class Pinned final : public c10::Allocator {
   public:
    c10::DataPtr allocate(std::size_t bytes) override {
        // torch 2.11 to 2.13 do so in relaxed mode while the current stream is captured.
        if (!if_captured(current_stream(gpu), [](const auto&) {})) require_safe("cuMemHostAlloc");
        constexpr std::size_t kGrain = 512;
        const std::size_t size = std::max<std::size_t>((bytes + kGrain - 1) / kGrain, 1) * kGrain;
        auto* const data = static_cast<std::byte*>(std::aligned_alloc(kGrain, size));
        const std::lock_guard hold(lock_);
        blocks_[data] = {size, false};
        return {data, data, &give_back, c10::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }

    bool has(const void* data) const {
        const auto* const place = static_cast<const std::byte*>(data);
        const std::lock_guard hold(lock_);
        const auto next = blocks_.upper_bound(place);
        if (next == blocks_.begin()) return false;
        const auto& [start, block] = *std::prev(next);
        return place < start + block.bytes;
    }

    void begin_test() {
        const std::lock_guard hold(lock_);
        std::erase_if(blocks_, [](const auto& entry) {
            if (entry.second.is_free) std::free(const_cast<std::byte*>(entry.first));
            return entry.second.is_free;
        });
    }

   private:
    struct Block {
        std::size_t bytes = 0;
        bool is_free = false;
    };

    static void give_back(void* data);

    mutable std::mutex lock_;
    std::map<const std::byte*, Block> blocks_;
};
inline Pinned pinned;

inline void Pinned::give_back(void* data) {
    const std::lock_guard hold(pinned.lock_);
    pinned.blocks_.at(static_cast<const std::byte*>(data)).is_free = true;
}

inline unsigned long long address_of(const void* data) {
    return reinterpret_cast<unsigned long long>(data);
}

// The host's memory is declared for the call alone: the CPU's allocator may hand it out again.
inline int copy_pageable(void* to, const void* from, std::size_t bytes, bool to_host,
                         Handle stream) {
    static std::mutex one_at_a_time;
    const std::lock_guard hold(one_at_a_time);
    const auto host = address_of(to_host ? to : from);
    driver.alloc(host, bytes, stream);
    driver.place_on_host(host, 0);
    const int error = driver.copy(address_of(to), address_of(from), bytes, stream);
    driver.free(host);
    driver.forget(host);
    return error;
}

inline int copy_pinned(void* to, const void* from, std::size_t bytes, bool to_host, Handle stream) {
    const int error = driver.copy(address_of(to), address_of(from), bytes, stream);
    if (error == 0 && !to_host) driver.lend(stream, address_of(from), bytes);
    return error;
}

// As torch does it: what has another type or another order of its elements goes through a tensor of
// the source's device on its way from the host, and of the target's on its way to it.
inline void host_copy(const at::Tensor& into, const at::Tensor& source, Handle stream,
                      bool host_waits) {
    const bool to_host = !into.is_cuda();
    const bool alike = into.dtype() == source.dtype() && into.sizes() == source.sizes() &&
                       into.strides() == source.strides() && into.is_non_overlapping_and_dense();
    if (!alike) {
        const at::AutoDispatchBelowADInplaceOrView no_autograd;
        const at::Tensor sent =
            (to_host ? source : source.to(into.dtype())).expand_as(into).contiguous();
        const bool fits = into.is_contiguous() && into.dtype() == sent.dtype();
        const at::Tensor landed =
            fits ? into : at::empty(into.sizes(), into.options().dtype(sent.dtype()));
        landed.copy_(sent, !host_waits);
        if (!fits) into.copy_(landed);
        return;
    }
    if (into.numel() == 0) return;
    ++counts.host_copies;
    // Work before the copy is done, so the bytes that it reads are there.
    driver.complete(stream);
    void* const to = into.mutable_data_ptr();
    const void* const from = source.const_data_ptr();
    const bool is_pinned = pinned.has(to_host ? to : from);
    require_success(
        (is_pinned ? copy_pinned : copy_pageable)(to, from, into.nbytes(), to_host, stream));
    if (!host_waits) return;
    ++counts.host_waits;
    require_success(driver.stream_synchronize(stream));
}

}  // namespace oracle
