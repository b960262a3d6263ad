// Ranges: what profilers such as Nsight Systems are told, by NVTX, and torch.profiler, in its own
// way (torch_range.hpp).
//
// All of NVTX's is in the NVTX domain "pykern". A range has kind and stage of its action as text
// ("F s2"), the kind's colour in the drawings, a category (the kind; COPY for every transfer), and
// an unsigned 64-bit payload: device << 48 | stage << 32 | microbatch. The range of a step has the
// text "step". A range spans the time between its two ends on the calling thread. Without a tool
// both ends together cost a few nanoseconds.
#pragma once

#include "exec/torch_range.hpp"
#include "plan/action.hpp"

struct CUstream_st;

namespace pykern {

// Whether ranges reach a tool at all.
bool nvtx_built() noexcept;

// A range on this thread. Ranges of a thread nest.
class [[nodiscard]] Range {
   public:
    // Around an action on a device; that of a copy is the sender.
    Range(Action action, int device) noexcept;
    // Around a step: on GPUs, around issuing it.
    static Range of_step() noexcept { return {}; }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
    ~Range();

   private:
    Range() noexcept;

    TorchRange torch_;
};

// Names the calling thread.
void name_thread(const char* name) noexcept;

// Names a stream of the CUDA driver for as long as the process lives.
void name_stream(CUstream_st* stream, const char* name) noexcept;

}  // namespace pykern
