// A plan on the fake driver in graph mode: each action of a slot is a graph that a test captured.
#pragma once

#include <bit>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "exec/streams.hpp"
#include "fake_cuda/controls.hpp"
#include "mixing.hpp"

namespace pykern {

class GraphJob final : private StreamClient {
   public:
    static constexpr Value kNumBatches = 4;

    GraphJob(const Plan& plan, const std::vector<LaneName>& names)
        : lanes_(std::make_shared<Lanes>(names)), job_(plan, lanes_), values_(job_.order(), true) {
        for (const auto& [gpu, primary] : lanes_->primaries()) {
            callers_.push_back(cuda::make_stream(primary.get()));
            caller_of_[gpu] = callers_.back().get();
            if (gpu % 2 == 0) fake_make_default(caller_of_[gpu]);
            given_callers_[gpu] = gpu % 2 == 0 ? nullptr : caller_of_[gpu];
        }
        launches_.resize(order().tasks().size());
        for (int device = 0; device < order().num_devices(); ++device) {
            const cuda::CUcontext context = lanes_->compute_context(device);
            asked_.push_back(cuda::make_event(context, cuda::kEventDisableTiming));
            brought_.push_back(cuda::make_event(context, cuda::kEventDisableTiming));
        }
        Mixer mixer(order().plan(), values_);
        for (TaskNumber task = 0; task < order().tasks().size(); ++task) {
            if (order().is_compute(order().tasks()[task])) give(task, mixer);
        }
        declare();
    }
    ~GraphJob() override {
        for (const cuda::CUdeviceptr address : declared_) fake_free(address);
    }
    GraphJob(const GraphJob&) = delete;
    GraphJob& operator=(const GraphJob&) = delete;

    const StreamJob& job() const { return job_; }
    const StreamOrder& order() const { return job_.order(); }

    // Issues a step, in which without `replay` the client does the same. Before it the caller may
    // have written to all memory of its GPU, and may read all after it. Returns what `run` does.
    bool issue(
        Value batch, bool replay,
        const std::function<bool(Dispatch&)>& run = [](Dispatch& dispatch) {
            return dispatch.run();
        }) {
        fake_begin_step();
        const cuda::CurrentContext current(lanes_->primary(0));
        touch_all(1);
        for (auto& [microbatch, value] : values_.batch) {
            copy(value, given_.at({batch, microbatch}), device_of(microbatch, 0));
        }
        for (auto& [place, sum] : values_.sums) copy(sum, zero_, home_of(place));
        Dispatch dispatch(job_, given_callers_, *this, replay, nullptr, nullptr);
        const bool ran = run(dispatch);
        Values& taken = taken_.emplace_back(order(), true);
        for (auto& [microbatch, loss] : values_.losses) {
            take(taken.losses[microbatch], loss, home_of_loss(microbatch));
        }
        for (auto& [place, sum] : values_.sums) take(taken.sums[place], sum, home_of(place));
        touch_all(0);
        return ran;
    }

    // The results of the steps since the last call, when they are done.
    std::vector<Results> results() {
        const cuda::CurrentContext current(job_.lanes().primary(0));
        for (const auto& [gpu, stream] : caller_of_) cuda::driver::cuStreamSynchronize(stream);
        std::vector<Results> results;
        results.reserve(taken_.size());
        for (const Values& taken : taken_) results.push_back(results_of(taken));
        for (const cuda::CUdeviceptr address : take_addresses_) {
            fake_free(address);
            fake_forget(address);
        }
        take_addresses_.clear();
        taken_.clear();
        return results;
    }

   private:
    bool run(TaskNumber number, Transfers& transfers) noexcept override {
        const Task& task = order().tasks()[number];
        const Launch& launch = launches_[number];
        const cuda::CUstream stream = job_.stream(task.stream);
        if (task.action.kind == Kind::REDUCE) {
            bring(task, launch.before);
        } else {
            move_on(stream, launch.before);
        }
        cuda::api().cuGraphLaunch(launch.exec, stream);
        move_on(stream, launch.after);
        const TaskNumber carrier = job_.carrier_of(number);
        if (carrier != StreamJob::kNoTask) transfers = job_.transfers(carrier);
        return true;
    }

    static void move_on(cuda::CUstream stream, const Transfers& transfers) {
        for (const Transfer& each : transfers) {
            cuda::api().cuMemcpyAsync(each.to, each.from, each.bytes, stream);
        }
    }

    // As torch copies from device to device: on the source's stream, after what the destination's
    // holds so far, and before what it holds later.
    void bring(const Task& task, const Transfers& transfers) {
        const cuda::Api& api = cuda::api();
        const cuda::CUstream here = job_.stream(task.stream);
        for (std::size_t i = 0; i < transfers.size(); ++i) {
            const int device = home_of({static_cast<int>(i) + 1, task.action.stage});
            const cuda::CUstream there = job_.stream(device);
            api.cuEventRecord(asked_[static_cast<std::size_t>(task.stream)].get(), here);
            api.cuStreamWaitEvent(there, asked_[static_cast<std::size_t>(task.stream)].get(), 0);
            move_on(there, {transfers[i]});
            api.cuEventRecord(brought_[static_cast<std::size_t>(device)].get(), there);
            api.cuStreamWaitEvent(here, brought_[static_cast<std::size_t>(device)].get(), 0);
        }
    }

    void give(TaskNumber number, Mixer& mixer) {
        const Task& task = order().tasks()[number];
        const Mix mix = mixer.mix_of(task.action);
        const std::tuple place(values_.replica_of(task.action), task.action.stage, task.action.kind,
                               task.slot);
        const cuda::CUcontext context = lanes_->primary(task.stream);
        auto& [held, exec] = captured_[place];
        if (!exec) {
            held = mix;
            exec = capture(held, context);
        }
        launches_[number] = {
            .exec = exec.get(), .graph = nullptr, .before = mix.before, .after = mix.after};
        // The client's, because it is several devices' at once.
        if (task.action.kind != Kind::REDUCE) job_.set_launch(number, launches_[number]);
        const TaskNumber carrier = job_.carrier_of(number);
        if (carrier == StreamJob::kNoTask) return;
        Transfers sent = mix.sent;
        for (Transfer& each : sent) each.via = std::bit_cast<cuda::CUdeviceptr>(&host_[each.to]);
        job_.set_transfers(carrier, sent);
    }

    static cuda::GraphExec capture(Mix& mix, cuda::CUcontext context) {
        const cuda::CurrentContext current(context);
        cuda::CUgraph graph =
            fake_make_graph(1000, [](void* argument) { static_cast<Mix*>(argument)->run(); }, &mix);
        for (Value* value : mix.reads) access(graph, value, 0);
        for (Value* value : mix.writes) access(graph, value, 1);
        cuda::CUgraphExec exec = nullptr;
        cuda::driver::cuGraphInstantiateWithFlags(&exec, graph, 0);
        return {exec, {context}};
    }

    static void access(cuda::CUgraph graph, Value* value, int writes) {
        fake_graph_access(graph, std::bit_cast<cuda::CUdeviceptr>(value), sizeof *value, writes);
    }

    int device_of(std::uint32_t microbatch, int stage) const {
        return order().plan().device_of(
            {.microbatch = microbatch, .stage = static_cast<std::uint16_t>(stage)});
    }
    int home_of(std::pair<int, int> replica_and_stage) const {
        const auto [replica, stage] = replica_and_stage;
        return order().plan().placement().device_of(stage, replica);
    }
    cuda::CUstream caller(int device) const { return caller_of_.at(lanes_->gpu_of(device)); }

    int home_of_loss(std::uint32_t microbatch) const {
        return device_of(microbatch, order().plan().num_stages() - 1);
    }

    // All memory is the callers', and freed when they have waited for the step.
    void declare() {
        for (auto& [place, value] : values_.parts) {
            own(value, home_of({std::get<0>(place), std::get<1>(place)}));
        }
        for (auto& [place, sum] : values_.sums) own(sum, home_of(place));
        for (auto& [place, sum] : values_.brought) own(sum, home_of({0, place.second}));
        for (auto& [microbatch, value] : values_.batch) own(value, device_of(microbatch, 0));
        for (auto& [microbatch, loss] : values_.losses) own(loss, home_of_loss(microbatch));
        for (auto& [to, value] : host_) allocate(value, 0);
        allocate(zero_, 0);
        for (Value batch = 0; batch < kNumBatches; ++batch) {
            for (const auto& [microbatch, value] : values_.batch) {
                Value& given = given_[{batch, microbatch}];
                given = batch_value(batch, microbatch);
                allocate(given, device_of(microbatch, 0));
            }
        }
    }

    void allocate(Value& value, int device) {
        declared_.push_back(std::bit_cast<cuda::CUdeviceptr>(&value));
        fake_alloc(declared_.back(), sizeof value, caller(device));
    }

    void own(Value& value, int device) {
        allocate(value, device);
        memory_of_[caller(device)].push_back({declared_.back(), sizeof value, 0});
    }

    void touch_all(int writes) {
        for (auto& [stream, accesses] : memory_of_) {
            for (FakeAccess& access : accesses) access.writes = writes;
            fake_kernel(stream, 1000, accesses.data(), accesses.size());
        }
    }

    void copy(Value& to, Value& from, int device) {
        const Transfer each = transfer(to, from);
        cuda::driver::cuMemcpyAsync(each.to, each.from, each.bytes, caller(device));
    }

    void take(Value& to, Value& from, int device) {
        take_addresses_.push_back(std::bit_cast<cuda::CUdeviceptr>(&to));
        fake_alloc(take_addresses_.back(), sizeof to, caller(device));
        copy(to, from, device);
    }

    std::shared_ptr<Lanes> lanes_;
    StreamJob job_;
    Values values_;
    std::vector<cuda::Stream> callers_;
    std::map<int, cuda::CUstream> caller_of_;
    // The same by the handles that a step gets: 0 on even GPUs, as of torch's default stream.
    std::map<int, cuda::CUstream> given_callers_;
    std::vector<Launch> launches_;    // by task
    std::vector<cuda::Event> asked_;  // by device
    std::vector<cuda::Event> brought_;
    std::map<std::tuple<int, int, Kind, int>, std::pair<Mix, cuda::GraphExec>> captured_;
    // The caller's inputs, by batch and microbatch, and the results it has taken of each step.
    std::map<std::pair<Value, std::uint32_t>, Value> given_;
    Value zero_ = 0;
    std::deque<Values> taken_;
    std::vector<cuda::CUdeviceptr> take_addresses_;
    // By way of what copies go where peers are out of reach, by where they land.
    std::map<cuda::CUdeviceptr, Value> host_;
    std::vector<cuda::CUdeviceptr> declared_;
    std::map<cuda::CUstream, std::vector<FakeAccess>> memory_of_;
};

}  // namespace pykern
