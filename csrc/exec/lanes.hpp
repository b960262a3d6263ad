// Lanes: the devices of a plan as GPUs, or parts of them, with the streams that compute.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cuda/lasting.hpp"
#include "cuda/objects.hpp"
#include "cuda/partition.hpp"

namespace pykern {

// One device of a plan: a GPU, or one of num_parts groups of its multiprocessors.
struct LaneName {
    int gpu;
    int part = 0;
    int num_parts = 1;
};

// Bytes that the GPU of a lane writes to the memory of any GPU.
struct LaneCopy {
    int sender;
    cuda::CUdeviceptr to;
    cuda::CUdeviceptr from;
    std::size_t bytes;
};

// Several lanes may share a GPU. Must be gone before the interpreter goes down.
class Lanes {
   public:
    // Throws std::invalid_argument where a part is out of range or two lanes part one GPU
    // differently.
    explicit Lanes(std::vector<LaneName> names);

    int size() const { return static_cast<int>(names_.size()); }
    int gpu_of(int lane) const { return names_[static_cast<std::size_t>(lane)].gpu; }
    cuda::CUstream compute(int lane) const { return compute_.at(static_cast<std::size_t>(lane)); }
    // The context that is current while work for the lane's GPU is issued, by any thread.
    cuda::CUcontext primary(int lane) const { return primaries_.at(gpu_of(lane)).get(); }
    // The context of the compute stream's events: that of its part, where the lane is one.
    cuda::CUcontext compute_context(int lane) const {
        return contexts_[static_cast<std::size_t>(lane)];
    }
    // Nothing runs on it: memory that torch allocates there has been used by nobody else's work.
    cuda::CUstream ring(int gpu) const { return rings_.at(gpu).get(); }
    // Whether the GPU of one lane can write to the memory of the other's, and may.
    bool reaches(int from, int to) const;
    // Takes the GPU of one lane for one that cannot write to the memory of the other's, because
    // what it wrote has arrived changed. For programs made from here on.
    void avoid(int from, int to) { peers_.erase({gpu_of(from), gpu_of(to)}); }
    // Copies to and from memory that nothing else uses: at once, each on a stream of its sender's
    // GPU on which nothing else runs. Returns when all have ended.
    void copy_at_once(const std::vector<LaneCopy>& copies) const;
    // Others get the streams from here on: nothing may be issued to them, and all work is done.
    void close();
    bool is_closed() const { return compute_.empty(); }
    // A context for each GPU in use.
    const std::map<int, cuda::PrimaryContext>& primaries() const { return primaries_; }

   private:
    void add(const LaneName& name);
    void ask_for_peers();

    std::vector<LaneName> names_;
    std::map<int, cuda::PrimaryContext> primaries_;
    std::map<int, cuda::LastingStream> rings_;
    std::map<int, cuda::Partition> partitions_;
    std::vector<cuda::CUcontext> contexts_;
    std::vector<cuda::CUstream> compute_;
    std::vector<cuda::LastingStream> of_gpus_;
    // Streams of a partition end with it.
    std::vector<cuda::Stream> of_parts_;
    // Pairs of GPUs of which the first can write to the memory of the second. The driver is asked
    // once, because every tensor that is sent asks.
    std::set<std::pair<int, int>> peers_;
};

}  // namespace pykern
