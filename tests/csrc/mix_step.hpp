// A step whose actions are graphs of the fake driver that mix what they read into what they write:
// the bytes at its end show in which order all of it ran.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "exec/stream_job.hpp"
#include "fake_pair.hpp"

namespace pykern {

class MixStep {
   public:
    // By what, replica, stage, and slot or microbatch.
    using Bytes = std::map<std::tuple<std::string, int, int, int>, std::array<std::uint8_t, 16>>;

    // Device d of the plan is a lane of GPU gpus[d]. Some actions are left without a launch.
    MixStep(const Plan& plan, const std::vector<int>& gpus, const std::set<Action>& without = {})
        : MixStep(plan, lanes_of(gpus), without) {}
    MixStep(const MixStep&) = delete;
    MixStep& operator=(const MixStep&) = delete;
    ~MixStep() {
        for (const auto& [gpu, stream] : callers) {
            cuda::api().cuStreamSynchronize(stream);
            cuda::api().cuStreamDestroy(stream);
        }
    }

    // The callers' part between steps: write new inputs, and read what the last step gave.
    void touch_inputs_and_results() const {
        for (const auto& [gpu, stream] : callers) {
            std::vector<FakeAccess> accesses;
            for (const auto& [place, bytes] : bytes_) {
                const auto& [what, replica, stage, index] = place;
                const bool is_input = what == "input";
                if (job.lanes().gpu_of(device_of(stage, replica)) != gpu) continue;
                if (!is_input && what != "loss" && what != "weights") continue;
                accesses.push_back({address_of(bytes), sizeof bytes, is_input ? 1 : 0});
            }
            fake_kernel(stream, 1000, accesses.data(), accesses.size());
        }
    }

    // The bytes when all is done.
    Bytes bytes() const {
        fake_run_all();
        return bytes_;
    }

    // Where bytes lie.
    cuda::CUdeviceptr at(const std::string& what, int replica, int stage, int index) {
        return address_of(bytes_[{what, replica, stage, index}]);
    }

    // One task after the other, on one stream.
    void run_in_order() const {
        const cuda::CUstream stream = callers.begin()->second;
        for (TaskNumber task = 0; task < job.order().tasks().size(); ++task) {
            if (const auto& its = job.launch(task)) {
                copy_all(its->before, stream);
                launch(its->graph, stream);
                copy_all(its->after, stream);
            }
            copy_all(job.transfers(task), stream);
        }
    }

    static std::shared_ptr<Lanes> lanes_of(const std::vector<int>& gpus) {
        std::vector<LaneName> names;
        names.reserve(gpus.size());
        for (const int gpu : gpus) names.push_back({.gpu = gpu});
        return std::make_shared<Lanes>(names);
    }

    StreamJob job;
    std::map<int, cuda::CUstream> callers;
    // The same by the handles that a step gets: 0 on even GPUs, as of torch's default stream.
    std::map<int, cuda::CUstream> given_callers;

   private:
    MixStep(const Plan& plan, const std::shared_ptr<Lanes>& lanes, const std::set<Action>& without)
        : job(plan, lanes) {
        for (const auto& [gpu, primary] : lanes->primaries()) {
            cuda::api().cuCtxSetCurrent(primary.get());
            cuda::api().cuStreamCreateWithPriority(&callers[gpu], cuda::kStreamNonBlocking, 0);
            if (gpu % 2 == 0) fake_make_default(callers[gpu]);
            given_callers[gpu] = gpu % 2 == 0 ? nullptr : callers[gpu];
        }
        for (TaskNumber task = 0; task < job.order().tasks().size(); ++task) {
            const Action action = job.order().tasks()[task].action;
            if (without.contains(action)) continue;
            if (action.kind == Kind::F) job.set_launch(task, forward(action));
            if (action.kind == Kind::B) job.set_launch(task, backward(action));
            if (action.kind == Kind::COPY_F) job.set_transfers(task, {copy_of(action, 1)});
            if (action.kind == Kind::COPY_B) job.set_transfers(task, {copy_of(action, -1)});
        }
    }

    // A stage of a replica, in which the action's microbatch has a slot.
    struct Cell {
        int stage;
        int replica;
        int slot;
    };
    Cell cell(int stage, Action action) const {
        const Plan& plan = job.order().plan();
        action.stage = static_cast<std::uint16_t>(stage);
        action.kind = Kind::F;
        return {stage, plan.placement().replica_of(action.microbatch), job.order().slot_of(action)};
    }
    int device_of(int stage, int replica) const {
        return job.order().plan().placement().device_of(stage, replica);
    }
    bool side_by_side(const Cell& one, const Cell& other) const {
        return device_of(one.stage, one.replica) == device_of(other.stage, other.replica);
    }

    // Its input comes from the caller, from a copy, or from the stage before on the same device.
    Launch forward(Action action) {
        const Cell its = cell(action.stage, action);
        const int microbatch = static_cast<int>(action.microbatch);
        Launch launch;
        if (its.stage == 0) {
            bytes_[{"input", its.replica, 0, microbatch}].fill(
                static_cast<std::uint8_t>(microbatch + 1));
            launch.before = {move(at("x", its), at("input", {0, its.replica, microbatch}))};
        } else if (const Cell former = cell(its.stage - 1, action); side_by_side(former, its)) {
            launch.before = {move(at("x", its), at("y", former))};
        }
        launch.graph = mix(action, {read("x", its), write("y", its)});
        if (its.stage + 1 == job.order().plan().num_stages()) {
            launch.after = {move(at("loss", {its.stage, its.replica, microbatch}), at("y", its))};
        }
        return launch;
    }

    Launch backward(Action action) {
        const Cell its = cell(action.stage, action);
        const Cell weights{its.stage, its.replica, 0};
        Launch launch;
        launch.graph =
            mix(action, {read("x", its), read("y", its), read("dy", its), write("dx", its),
                         read("weights", weights), write("weights", weights)});
        if (its.stage == 0) return launch;
        if (const Cell former = cell(its.stage - 1, action); side_by_side(former, its)) {
            launch.after = {move(at("dy", former), at("dx", its))};
        }
        return launch;
    }

    // To the next stage or the one before.
    Transfer copy_of(Action action, int direction) {
        const Cell from = cell(action.stage, action);
        const Cell to = cell(action.stage + direction, action);
        const bool forwards = direction > 0;
        Transfer transfer = move(at(forwards ? "x" : "dy", to), at(forwards ? "y" : "dx", from));
        if (!job.lanes().reaches(device_of(from.stage, from.replica),
                                 device_of(to.stage, to.replica))) {
            transfer.via = at(forwards ? "host of x" : "host of dy", to);
        }
        return transfer;
    }

    static cuda::CUgraph mix(Action action, const std::vector<FakeAccess>& accesses) {
        const std::uint64_t salt = action.stage * 100U + static_cast<unsigned>(action.kind);
        return fake_make_mix_graph(1000, salt, accesses.data(), accesses.size());
    }

    static void copy_all(const Transfers& transfers, cuda::CUstream stream) {
        for (const auto& [to, from, bytes, via] : transfers) {
            if (via != 0) cuda::api().cuMemcpyAsync(via, from, bytes, stream);
            cuda::api().cuMemcpyAsync(to, via != 0 ? via : from, bytes, stream);
        }
    }

    static void launch(cuda::CUgraph graph, cuda::CUstream stream) {
        cuda::CUgraphExec exec = nullptr;
        cuda::api().cuGraphInstantiateWithFlags(&exec, graph, 0);
        cuda::api().cuGraphLaunch(exec, stream);
        cuda::api().cuStreamSynchronize(stream);
        cuda::api().cuGraphExecDestroy(exec);
    }

    static Transfer move(cuda::CUdeviceptr to, cuda::CUdeviceptr from) {
        return {.to = to, .from = from, .bytes = 16};
    }
    cuda::CUdeviceptr at(const std::string& what, const Cell& cell) {
        return at(what, cell.replica, cell.stage, cell.slot);
    }
    FakeAccess read(const std::string& what, const Cell& cell) { return {at(what, cell), 16, 0}; }
    FakeAccess write(const std::string& what, const Cell& cell) { return {at(what, cell), 16, 1}; }

    Bytes bytes_;
};

}  // namespace pykern
