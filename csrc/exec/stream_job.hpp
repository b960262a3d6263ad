// Stream job: a stream order on certain lanes, with the events it needs and what its tasks move
// and launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exec/lanes.hpp"
#include "exec/stream_order.hpp"

namespace pykern {

class StepMarks;

// Bytes that go from one address to another; by way of pinned memory of the host where neither
// device reaches the other's memory.
struct Transfer {
    cuda::CUdeviceptr to = 0;
    cuda::CUdeviceptr from = 0;
    std::size_t bytes = 0;
    cuda::CUdeviceptr via = 0;
};
using Transfers = std::vector<Transfer>;

// Calls take(part) for parts of transfers by way of the host, in their order: while one part leaves
// the host, the next arrives there. Parts of 4 MiB take 0.2 ms on a bus of 25 GB/s, many times as
// long as the calls that issue them.
template <class Take>
void in_parts(const Transfers& transfers, Take&& take) {
    constexpr std::size_t kMost = std::size_t{4} << 20;
    for (const Transfer& whole : transfers) {
        for (std::size_t at = 0; at < whole.bytes; at += kMost) {
            take(Transfer{.to = whole.to + at,
                          .from = whole.from + at,
                          .bytes = std::min(kMost, whole.bytes - at),
                          .via = whole.via + at});
        }
    }
}

// An action in graph mode: a captured graph, between copies of its inputs and of its results, all
// at addresses that stay.
struct Launch {
    // Null where there is nothing to compute.
    cuda::CUgraphExec exec = nullptr;
    // The graph that `exec` was made of.
    cuda::CUgraph graph = nullptr;
    Transfers before;
    Transfers after;
};

// The driver's objects for one copy stream.
struct CopyLane {
    // Transfers by way of the host need a stream of the receiver for their second half.
    struct ByHost {
        cuda::LastingStream landing;
        cuda::Event half;
        cuda::Event landed;
    };

    cuda::LastingStream stream;
    cuda::Event end;
    std::optional<ByHost> by_host;
};

// "pykern dev2 > dev3 F": what F makes goes from device 2 to 3.
std::string name_of_copies(const CopyStream& ends);

// The tasks of a plan that a job issues: all of them, its forwards with their copies, or the rest.
// A job of the rest begins behind one of the forwards, as any step begins behind the one before.
enum class Half : std::uint8_t { kWhole, kForwards, kRest };

// Everything the driver must make is made up front, because making takes locks.
class StreamJob {
   public:
    // Throws PlanError for a plan that cannot run, std::invalid_argument for one of other devices,
    // or for a half where a device has a forward behind another action.
    StreamJob(const Plan& plan, std::shared_ptr<const Lanes> lanes, Half half = Half::kWhole);

    Half half() const { return half_; }
    // The tasks that the job issues, in their order.
    const std::vector<TaskNumber>& issued() const { return issued_; }

    const StreamOrder& order() const { return *order_; }
    const Lanes& lanes() const { return *lanes_; }
    // For what may outlive the job.
    std::shared_ptr<const StreamOrder> shared_order() const { return order_; }
    std::shared_ptr<const Lanes> shared_lanes() const { return lanes_; }
    // Marks for a step that begins. They are made for as many steps as are under way at once.
    std::shared_ptr<StepMarks> take_marks();

    static constexpr TaskNumber kNoTask = static_cast<TaskNumber>(-1);
    // The task of an action or a copy, or kNoTask.
    TaskNumber task_of(Action action) const;
    // The copy of what the task gives, or kNoTask.
    TaskNumber carrier_of(TaskNumber task) const { return carriers_[task]; }

    // An action without a launch is run by the client.
    void set_launch(TaskNumber task, Launch launch);
    const std::optional<Launch>& launch(TaskNumber task) const { return launches_[task]; }
    void set_transfers(TaskNumber copy, Transfers transfers);
    const Transfers& transfers(TaskNumber copy) const { return transfers_[copy]; }

    // Changes whenever a launch or transfers are set.
    std::uint64_t version() const { return version_; }

    // Streams as the program numbers them, and the context that their events are made under.
    cuda::CUstream stream(int number) const;
    cuda::CUcontext context_of(int stream) const;
    const CopyLane& copy_lane(const Task& copy) const {
        return copy_lanes_[static_cast<std::size_t>(copy.stream - order_->num_devices())];
    }
    const std::vector<CopyLane>& copy_lanes() const { return copy_lanes_; }
    // The event of a task that is awaited.
    cuda::CUevent done(TaskNumber task) const { return done_[task].get(); }
    // When all that the lane did before the step is done, and the step may begin there.
    cuda::CUevent lane_start(int lane) const {
        return lane_start_[static_cast<std::size_t>(lane)].get();
    }
    cuda::CUevent lane_end(int lane) const {
        return lane_end_[static_cast<std::size_t>(lane)].get();
    }
    // Has the step begin after what the callers' streams, one for each GPU, hold so far. Makes
    // other contexts current.
    void record_start(const std::map<int, cuda::CUstream>& callers) const;
    // When the caller began the step, by GPU.
    cuda::CUevent start(int gpu) const { return start_.at(gpu).get(); }

   private:
    void require_halves() const;
    void make_events();
    void require(TaskNumber task, bool compute) const;

    std::shared_ptr<const StreamOrder> order_;
    std::shared_ptr<const Lanes> lanes_;
    Half half_;
    std::vector<TaskNumber> issued_;
    std::map<Action, TaskNumber> task_of_;
    std::vector<TaskNumber> carriers_;
    std::vector<std::optional<Launch>> launches_;
    std::vector<Transfers> transfers_;
    std::uint64_t version_ = 0;

    std::vector<CopyLane> copy_lanes_;
    std::vector<cuda::Event> done_;
    std::vector<cuda::Event> lane_start_;
    std::vector<cuda::Event> lane_end_;
    std::map<int, cuda::Event> start_;
    std::vector<std::shared_ptr<StepMarks>> marks_;
};

}  // namespace pykern
