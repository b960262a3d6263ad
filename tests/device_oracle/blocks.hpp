// Memory as torch's caching allocator hands it out: what is freed comes back at once, to the same
// stream, or to captures into the same pool. So an access that no wait orders meets another's
// bytes.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "capture.hpp"

namespace oracle {

inline c10::Device device_of(int index) {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

// Memory belongs to a pool, 0 outside captures, and to a stream; it comes back for its size.
using Owner = std::tuple<Pool, Handle, std::size_t>;

struct Block {
    void* data;
    Owner owner;
    int test;
    int gpu = 0;
    // Another stream has used it: it comes back when that has ended, which is never asked here.
    bool is_shared = false;
};

class Blocks {
   public:
    static constexpr std::size_t kTerabyte = std::size_t{1} << 40U;

    Block* take(int of, std::size_t bytes) {
        constexpr std::size_t kGrain = 512;
        const Handle stream = current_stream(of);
        const Owner owner{pool_of(stream), stream, (bytes + kGrain - 1) / kGrain * kGrain};
        // torch allocates in relaxed mode for a stream that is captured. The driver is not called
        // under the lock, which work that it runs takes.
        if (pool_of(stream) == 0 && !has_free(owner)) require_safe("cuMemAlloc");
        const std::lock_guard hold(lock_);
        std::vector<Block*>& free = free_[owner];
        if (free.empty()) {
            make_room(of, std::get<2>(owner), pool_of(stream) != 0);
            free.push_back(new Block{std::aligned_alloc(kGrain, std::get<2>(owner)), owner, test_});
            live_.at(of).held += std::get<2>(owner);
        } else {
            ++counts.blocks_again;
        }
        Block* const block = free.back();
        free.pop_back();
        Live& live = live_.at(of);
        live.bytes += std::get<2>(owner);
        live.peak = std::max(live.peak, live.bytes);
        block->gpu = of;
        return block;
    }

    void give_back(Block* block) {
        const std::lock_guard hold(lock_);
        if (block->test != test_) {
            destroy(block);
            return;
        }
        live_.at(block->gpu).bytes -= std::get<2>(block->owner);
        (block->is_shared ? shared_ : free_[block->owner]).push_back(block);
    }

    // Graphs have the memory of their pool for as long as one of them is there.
    void use_pool(Pool pool, int graphs) {
        const std::lock_guard hold(lock_);
        graphs_[pool] += graphs;
    }
    // No tensor of this test gets free memory again, unless the memory belongs to a graph.
    void empty_cache(int of) {
        const std::lock_guard hold(lock_);
        release(of);
    }

    // The limit is that of each GPU, until the end of the test.
    void set_limit(std::size_t bytes) { limit_ = bytes; }

    // Addresses may come back as any other from here on.
    void begin_test() {
        const std::lock_guard hold(lock_);
        ++test_;
        limit_ = kTerabyte;
        graphs_.clear();
        for (Block* const block : given_back_) destroy(block);
        given_back_.clear();
        for (const auto& [owner, blocks] : free_) {
            for (Block* const block : blocks) destroy(block);
        }
        for (Block* const block : shared_) destroy(block);
        free_.clear();
        shared_.clear();
        live_ = {};
    }

    // The bytes that tensors of a GPU have now, and the most that they had.
    std::size_t bytes(int of) {
        const std::lock_guard hold(lock_);
        return live_.at(of).bytes;
    }
    std::size_t peak(int of) {
        const std::lock_guard hold(lock_);
        return live_.at(of).peak;
    }
    // With those that are kept for reuse.
    std::size_t held(int of) {
        const std::lock_guard hold(lock_);
        return live_.at(of).held;
    }
    std::size_t limit() const { return limit_; }
    void reset_peak(int of) {
        const std::lock_guard hold(lock_);
        live_.at(of).peak = live_.at(of).bytes;
    }

   private:
    void release(int of) {
        for (auto& [owner, blocks] : free_) {
            if (graphs_[std::get<0>(owner)] > 0) continue;
            const auto is_elsewhere = [of](const Block* block) { return block->gpu != of; };
            const auto first = std::partition(blocks.begin(), blocks.end(), is_elsewhere);
            live_.at(of).held -=
                std::get<2>(owner) * static_cast<std::size_t>(blocks.end() - first);
            given_back_.insert(given_back_.end(), first, blocks.end());
            blocks.erase(first, blocks.end());
        }
    }

    // As in torch, a capture takes nothing from what is kept for reuse.
    void make_room(int of, std::size_t bytes, bool is_captured) {
        const auto fits = [&] { return live_.at(of).held + bytes <= limit_; };
        if (!fits() && !is_captured) release(of);
        TORCH_CHECK_WITH(OutOfMemoryError, fits(), "CUDA out of memory. Tried to allocate ", bytes,
                         " bytes of GPU ", of);
    }

    bool has_free(const Owner& owner) {
        const std::lock_guard hold(lock_);
        return !free_[owner].empty();
    }

    struct Live {
        std::size_t bytes = 0;
        std::size_t peak = 0;
        std::size_t held = 0;
    };

    static void destroy(Block* block) {
        std::free(block->data);
        delete block;
    }

    std::mutex lock_;
    std::map<Owner, std::vector<Block*>> free_;
    std::vector<Block*> shared_;
    std::vector<Block*> given_back_;
    std::map<Pool, int> graphs_;
    std::size_t limit_ = kTerabyte;
    std::array<Live, kMaxGpus> live_{};
    int test_ = 0;
};
inline Blocks blocks;

inline void give_back(void* block) { blocks.give_back(static_cast<Block*>(block)); }

inline c10::DataPtr allocate_on(c10::Device device, std::size_t bytes) {
    if (bytes == 0) return {nullptr, device};
    Block* const block = blocks.take(device.index(), bytes);
    return {block->data, block, &give_back, device};
}

inline void use_on(const c10::DataPtr& memory, Handle stream) {
    if (memory.get_deleter() != &give_back) return;
    auto* const block = static_cast<Block*>(memory.get_context());
    if (std::get<1>(block->owner) != stream) block->is_shared = true;
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(std::size_t bytes) override { return allocate_on(device_of(gpu), bytes); }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }
};
inline Memory memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory);

inline c10::Storage storage_on(c10::Device device, std::size_t bytes) {
    return {c10::Storage::use_byte_size_t(), bytes, allocate_on(device, bytes), &memory, true};
}

}  // namespace oracle
