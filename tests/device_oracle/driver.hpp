// The fake driver, and what this thread has made current: the state of torch's CUDA in this
// process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace oracle {

using Handle = void*;

constexpr int kMaxGpus = 8;

struct Access {
    unsigned long long address;
    std::size_t bytes;
    int writes;
};

// Filled by oracle.py from library.py, which has the same fields in the same order.
struct Driver {
    int (*set_current)(void*);
    int (*get_current)(void**);
    int (*event_create)(void**, unsigned);
    int (*event_destroy)(void*);
    int (*event_record)(void*, Handle);
    int (*event_synchronize)(void*);
    int (*event_query)(void*);
    int (*stream_wait)(Handle, void*, unsigned);
    int (*stream_synchronize)(Handle);
    int (*copy)(unsigned long long, unsigned long long, std::size_t, Handle);
    void (*complete)(Handle);
    void (*kernel)(Handle, double, const Access*, std::size_t);
    void (*order)(Handle, Handle);
    std::size_t (*add_node)(void*, double, void (*)(void*), void*, const Access*, std::size_t,
                            const std::size_t*, std::size_t);
    void (*alloc)(unsigned long long, std::size_t, Handle);
    void (*place_on_host)(unsigned long long, int);
    void (*lend)(Handle, unsigned long long, std::size_t);
    void (*free)(unsigned long long);
    void (*forget)(unsigned long long);
    int (*unsafe)(const char*);
    void* contexts[kMaxGpus];
    // Streams that stand for handle 0 of each GPU.
    Handle defaults[kMaxGpus];
    int num_gpus;
};
inline Driver driver;

// Counted from several threads; nothing else is read after them.
struct Counts {
    std::atomic<std::int64_t> kernels{0};
    std::atomic<std::int64_t> copies{0};
    std::atomic<std::int64_t> host_copies{0};
    std::atomic<std::int64_t> records{0};
    std::atomic<std::int64_t> waits{0};
    std::atomic<std::int64_t> host_waits{0};
    std::atomic<std::int64_t> draws{0};
    std::atomic<std::int64_t> captures{0};
    std::atomic<std::int64_t> captured{0};
    std::atomic<std::int64_t> forks{0};
    std::atomic<std::int64_t> replayed{0};
    std::atomic<std::int64_t> blocks_again{0};
};
inline Counts counts;

// As torch's, current are one GPU, and one stream of each; 0 is the default stream.
inline thread_local int gpu = 0;
inline thread_local Handle streams[kMaxGpus] = {};

inline Handle handle_of(int of, Handle stream) { return stream ? stream : driver.defaults[of]; }
inline Handle current_stream(int of) { return handle_of(of, streams[of]); }

// The driver's objects are made and used under the context of their GPU.
class Within {
   public:
    explicit Within(int of) {
        driver.get_current(&before_);
        driver.set_current(driver.contexts[of]);
    }
    ~Within() { driver.set_current(before_); }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    void* before_ = nullptr;
};

}  // namespace oracle
