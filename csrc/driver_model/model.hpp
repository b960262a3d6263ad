// Everything the fake driver knows: devices, contexts, streams, events, graphs.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver_model/faults.hpp"
#include "driver_model/graph.hpp"
#include "driver_model/handles.hpp"
#include "driver_model/lent.hpp"
#include "driver_model/log.hpp"
#include "driver_model/memory.hpp"
#include "driver_model/schedule.hpp"
#include "driver_model/violations.hpp"

namespace pykern::fake {

using cuda::CUresult;

inline constexpr int kNumMultiprocessors = 132;  // as an H200
inline constexpr CUresult kNotInitialized = 3;
inline constexpr CUresult kInvalidDevice = 101;
inline constexpr CUresult kInvalidContext = 201;
inline constexpr CUresult kPeerAccessUnsupported = 217;
inline constexpr CUresult kInvalidHandle = 400;
inline constexpr CUresult kContextIsDestroyed = 709;
inline constexpr CUresult kCaptureUnsupported = 900;
inline constexpr CUresult kInvalidResourceType = 914;
inline constexpr CUresult kInvalidResourceConfiguration = 915;

// Ends a call with this error.
class Refused : public std::exception {
   public:
    explicit Refused(CUresult error) : error_(error) {}
    CUresult error() const { return error_; }

   private:
    CUresult error_;
};

struct Device {
    cuda::CUcontext primary = nullptr;
    int retained = 0;
};

struct Context {
    int device = 0;
    bool green = false;
    std::shared_ptr<Stream> default_stream;  // made when it is first used
};

struct Event {
    cuda::CUcontext context = nullptr;
    bool timed = false;
    int device = 0;
    std::shared_ptr<const Mark> mark;
    std::size_t number = 0;  // from 1, once it is recorded
};

// Multiprocessors first to first + count - 1 of a device.
struct Group {
    int device = 0;
    unsigned first = 0;
    unsigned count = 0;
};

struct Green {
    Group group;
    cuda::CUcontext context = nullptr;
};

struct CopyCost {
    double latency_ns = 1000;
    double bytes_per_ns = 100;
    double duration_ns(std::size_t bytes) const {
        return latency_ns + static_cast<double>(bytes) / bytes_per_ns;
    }
};

// One lock over it all: see entry.hpp.
struct Model {
    Model(int num_devices, std::uint64_t seed);

    Log log;
    Violations violations{log};
    Faults faults;
    Schedule schedule;
    Memory memory{violations};
    Lent lent{violations};
    CopyCost copy_cost;

    std::vector<Device> devices;
    std::map<std::thread::id, cuda::CUcontext> current;
    std::set<std::pair<int, int>> unreachable;
    std::set<std::pair<int, int>> corrupt;
    std::set<std::pair<cuda::CUcontext, cuda::CUcontext>> peers;
    Handles<cuda::CUcontext, Context> contexts;
    Handles<cuda::CUgreenCtx, Green> greens;
    Handles<cuda::CUdevResourceDesc, Group> descriptions;
    Handles<cuda::CUstream, Stream> streams;
    Handles<cuda::CUevent, Event> events;
    Handles<cuda::CUgraph, Graph> graphs;
    Handles<cuda::CUgraphExec, Exec> execs;

    // Work that the host knows to be done, and when it came to know: before all it issues later.
    Clock host;
    double host_ns = 0;
    int step = 0;
    std::uint64_t staged_copies = 0;
    std::uint64_t pageable_copies = 0;
    // The most work of a stream that waits for its turn, as in a GPU's queue; more makes the host
    // wait. And how often it has.
    std::size_t most_queued = 1024;
    std::uint64_t full_queues = 0;
    // The work that a function issues as the nth from now on hangs.
    std::string hangs_in;
    int hangs_at = 0;
    // The nth node of the next launch that does work hangs.
    int node_to_hang = 0;
    // Streams are captured in the mode that forbids unsafe calls to all threads but relaxed ones.
    bool capturing = false;
    // The thread that captures in the mode that forbids them to itself alone.
    std::optional<std::thread::id> captures_alone;
    std::map<std::thread::id, int> capture_modes;
    int waits_to_drop = 0;  // the wait at which it reaches 0 is left out

    // The object that a handle stands for. A wrong one is a violation, and ends the call.
    Device& device(int ordinal);
    cuda::CUcontext current_context();
    Context& context(cuda::CUcontext handle);
    Stream& stream(cuda::CUstream handle);
    Event& event(cuda::CUevent handle);
    Graph& graph(cuda::CUgraph handle);
    Exec& exec(cuda::CUgraphExec handle);
    Green& green(cuda::CUgreenCtx handle);
    // The multiprocessors for work of the stream.
    Group group_of(const Stream& stream) const;

    // The primary context of a device, which lives until it is released as often.
    cuda::CUcontext retain(int ordinal);
    void release(int ordinal);
    std::shared_ptr<Stream> make_stream(cuda::CUcontext owner);
    Site issue(Stream& stream, Work work, double duration_ns);
    // Ends a call that breaks a capture.
    void require_safe_beside_captures();
    // A copy of memory that is not pinned makes the host wait for the stream.
    void finish_pageable(const Stream& stream, cuda::CUdeviceptr to, cuda::CUdeviceptr from);
    void record(Stream& stream, Event& event);
    // Has the event tell, by a mark, of the work that the stream holds by now.
    void mark(Stream& stream, Event& event, const std::shared_ptr<Mark>& mark);
    void wait(Stream& stream, const Event& event);
    void host_waits_for(const Clock& clock, double time_ns);
    // Ends the call where the host would wait for ever.
    void require_reached(bool reached);
    void count_if_staged(const Stream& stream, cuda::CUdeviceptr to, cuda::CUdeviceptr from);
    // Moves bytes when it runs; loses the last one on its way between devices that corrupt.
    Work copy_work(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes) const;
    // After a sticky error.
    void drop_work();

    [[noreturn]] void refuse(const std::string& text, CUresult error);

   private:
    void make_room(const Stream& stream);

    std::size_t num_streams_ = 0;
    std::size_t num_events_ = 0;
};

}  // namespace pykern::fake
