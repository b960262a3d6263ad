// Objects that the driver makes and must be told to end: contexts, streams, events, graphs.
#pragma once

#include <unistd.h>

#include <exception>
#include <memory>

#include "cuda/driver.hpp"

namespace pykern::cuda {

// Makes a context current on this thread, and at its end whichever was current before.
class CurrentContext {
   public:
    explicit CurrentContext(CUcontext context);
    ~CurrentContext();

    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

   private:
    CUcontext before_ = nullptr;
};

// Ends an object under the context it was made under, from whichever thread. Nobody could act on a
// failure, and at exit the driver may be gone already. After a fork the child has no such object:
// there it does nothing.
template <const auto& kEnd>
struct Destroy {
    CUcontext context = nullptr;
    pid_t process = getpid();

    template <class Handle>
    void operator()(Handle handle) const noexcept {
        if (process != getpid()) return;
        try {
            const CurrentContext current(context);
            // NOLINTNEXTLINE(readability-redundant-parentheses): the compiler puts them there
            kEnd(handle);
        } catch (const std::exception&) {
            return;
        }
    }
};

template <class Object, const auto& kEnd>
using Owned = std::unique_ptr<Object, Destroy<kEnd>>;

// None of them may outlive the context it was made under.
using Stream = Owned<CUstream_st, driver::cuStreamDestroy>;
using Event = Owned<CUevent_st, driver::cuEventDestroy>;
using Graph = Owned<CUgraph_st, driver::cuGraphDestroy>;
using GraphExec = Owned<CUgraphExec_st, driver::cuGraphExecDestroy>;
using GreenContext = Owned<CUgreenCtx_st, driver::cuGreenCtxDestroy>;

// Does not wait for the default stream, nor that for it. Lower numbers go first.
Stream make_stream(CUcontext context, int priority = 0);

// Can be recorded on streams of the same context only. Flags: kEventTimed or kEventDisableTiming.
Event make_event(CUcontext context, unsigned flags);

struct ReleasePrimary {
    CUdevice device = 0;
    pid_t process = getpid();

    void operator()(CUcontext context) const noexcept;
};

// The context of a device that torch uses too, held while this lives.
class PrimaryContext {
   public:
    // Throws std::out_of_range for a device that is not there.
    explicit PrimaryContext(int device);

    int device() const { return device_; }
    CUcontext get() const { return context_.get(); }

   private:
    int device_;
    std::unique_ptr<CUctx_st, ReleasePrimary> context_;
};

}  // namespace pykern::cuda
