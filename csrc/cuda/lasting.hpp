// Streams that outlive their user, for the next one: torch keeps memory for every stream that it
// has seen for as long as the process lives, 32 MiB for cuBLAS, and what its allocator has cached.
//
//     LastingStream stream = take_stream(device, StreamUse::kCompute);
//     stream.reset();  // the next to take one for the same use of the device gets this one
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>

#include "cuda/objects.hpp"

namespace pykern::cuda {

// One that has run kernels never becomes a ring's: torch may cache memory for it that they used.
enum class StreamUse : std::uint8_t { kCompute, kRing, kCopy };

struct MadeStream {
    PrimaryContext primary;
    StreamUse use;
    Stream stream;
};

struct GiveBack {
    void operator()(MadeStream* made) const noexcept;
};

// At any time a stream has one user. Work that it had before goes first.
class LastingStream {
   public:
    explicit LastingStream(std::unique_ptr<MadeStream> made) : made_(made.release()) {}

    CUstream get() const { return made_->stream.get(); }
    void reset() { made_.reset(); }

   private:
    std::unique_ptr<MadeStream, GiveBack> made_;
};

// The stream that has been idle for longest, or a new one.
LastingStream take_stream(int device, StreamUse use);

// Ends those without a user.
void destroy_idle_streams();

}  // namespace pykern::cuda
