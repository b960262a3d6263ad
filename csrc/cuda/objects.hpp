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

// Where a handle is of use: in the process that got it, as a child after a fork has no such object,
// and while its driver is in use.
struct Origin {
    pid_t process = getpid();
    unsigned driver = choice();

    bool is_here() const { return process == getpid() && driver == choice(); }
};

// Ends an object under the context it was made under, from whichever thread. Nobody could act on a
// failure, and at exit the driver may be gone already.
template <const auto& kEnd>
struct Destroy {
    CUcontext context = nullptr;
    Origin origin = {};

    template <class Handle>
    void operator()(Handle handle) const noexcept {
        if (!origin.is_here()) return;
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
    Origin origin = {};

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
