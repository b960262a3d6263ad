// A model without tensors: what actions do to the numbers that stand for what their cells hold.
// Values that an action reads show in all that follows from it.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "exec/stream_job.hpp"

namespace pykern {

using Value = std::uint64_t;

inline Value mixed(Value hash, Value value) {
    hash = (hash ^ value) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    return hash ^ (hash >> 31);
}

// The values of a cell: landed, kept by F for backward, made anew by R, kept by I for W, and sent.
enum class Part : std::uint8_t { kLanded, kGradient, kForBackward, kForWeight, kOutput, kSentBack };

// All values of a plan, at addresses that stay: a cell's, in its slot or in a place of its own; the
// batch and the losses, by microbatch; and the gradients of stages.
class Values {
   public:
    Values(const StreamOrder& order, bool in_slots) : order_(order), in_slots_(in_slots) {}

    Value& at(Part part, Action cell) {
        const int place = in_slots_ ? order_.slot_of(cell) : static_cast<int>(cell.microbatch);
        const int replica = replica_of(cell);
        return parts[{replica, cell.stage, place, part}];
    }
    Value& sum(Action cell) { return sums[{replica_of(cell), cell.stage}]; }
    int replica_of(Action cell) const {
        return order_.plan().placement().replica_of(cell.microbatch);
    }

    std::map<std::tuple<int, int, int, Part>, Value> parts;  // by replica, stage, place
    std::map<std::uint32_t, Value> batch;
    std::map<std::uint32_t, Value> losses;
    std::map<std::pair<int, int>, Value> sums;  // by replica, stage
    // The sums of further replicas where the first one's are.
    std::map<std::pair<int, int>, Value> brought;

   private:
    const StreamOrder& order_;
    bool in_slots_;
};

inline Transfer transfer(Value& to, Value& from) {
    return {.to = std::bit_cast<cuda::CUdeviceptr>(&to),
            .from = std::bit_cast<cuda::CUdeviceptr>(&from),
            .bytes = sizeof to};
}

// The work of an action, between its fetch and its hand-over: to a stage on its own device
// by itself, to others by a copy.
struct Mix {
    Value salt = 0;
    std::vector<Value*> reads;
    std::vector<Value*> writes;
    Transfers before;
    Transfers after;
    Transfers sent;

    void run() const {
        Value hash = salt;
        for (const Value* value : reads) hash = mixed(hash, *value);
        for (Value* value : writes) *value = hash = mixed(hash, writes.size());
    }
};

class Mixer {
   public:
    Mixer(const Plan& plan, Values& values) : plan_(plan), values_(values) {}

    Mix mix_of(Action action) {
        Mix mix;
        mix.salt = mixed(action.stage, static_cast<Value>(action.kind));
        switch (action.kind) {
            case Kind::F:
                forward(action, mix);
                break;
            case Kind::B:
            case Kind::I:
                backward(action, mix);
                break;
            case Kind::R:
                mix.reads = {&values_.at(Part::kLanded, action)};
                mix.writes = {&values_.at(Part::kForBackward, action)};
                break;
            case Kind::W:
                mix.reads = {&values_.at(Part::kLanded, action),
                             &values_.at(Part::kForBackward, action),
                             &values_.at(Part::kForWeight, action), &values_.sum(action)};
                mix.writes = {&values_.sum(action)};
                break;
            default:
                reduce(action, mix);
        }
        return mix;
    }

   private:
    static Action cell(Action action, int stage) {
        action.stage = static_cast<std::uint16_t>(stage);
        return action;
    }

    void forward(Action action, Mix& mix) {
        Value& input = values_.at(Part::kLanded, action);
        Value& output = values_.at(Part::kOutput, action);
        mix.reads = {&input};
        // The last one as a temporary: graphs of a slot share their memory.
        mix.writes = {&output, &values_.at(Part::kForBackward, action),
                      &values_.at(Part::kSentBack, action)};
        const Action previous = cell(action, action.stage - 1);
        const Action next = cell(action, action.stage + 1);
        if (action.stage == 0) {
            mix.before = {transfer(input, values_.batch[action.microbatch])};
        } else if (stays(previous, action)) {
            mix.before = {transfer(input, values_.at(Part::kOutput, previous))};
        }
        if (action.stage + 1 == plan_.num_stages()) {
            mix.after = {transfer(values_.losses[action.microbatch], output)};
        } else if (!stays(action, next)) {
            mix.sent = {transfer(values_.at(Part::kLanded, next), output)};
        }
    }

    void backward(Action action, Mix& mix) {
        const bool last = action.stage + 1 == plan_.num_stages();
        Value& result = values_.at(Part::kSentBack, action);
        mix.reads = {&values_.at(Part::kForBackward, action),
                     &values_.at(last ? Part::kOutput : Part::kGradient, action)};
        mix.writes = {&result};
        if (action.kind == Kind::B) {
            mix.reads.push_back(&values_.at(Part::kLanded, action));
            mix.reads.push_back(&values_.sum(action));
            mix.writes.push_back(&values_.sum(action));
        } else {
            mix.writes.push_back(&values_.at(Part::kForWeight, action));
        }
        if (action.stage == 0) return;
        const Action previous = cell(action, action.stage - 1);
        // Not fetched by the previous stage's B: by then another microbatch may have this slot.
        Transfers& way = stays(previous, action) ? mix.after : mix.sent;
        way.push_back(transfer(values_.at(Part::kGradient, previous), result));
    }

    void reduce(Action action, Mix& mix) {
        Value& sum = values_.sums[{0, action.stage}];
        mix.reads = {&sum};
        mix.writes = {&sum};
        for (int replica = 1; replica < plan_.placement().num_replicas(); ++replica) {
            const std::pair place(replica, int{action.stage});
            mix.reads.push_back(&values_.brought[place]);
            mix.before.push_back(transfer(values_.brought[place], values_.sums[place]));
        }
    }

    bool stays(Action one, Action other) const {
        return plan_.device_of(one) == plan_.device_of(other);
    }

    const Plan& plan_;
    Values& values_;
};

// The losses, and the sums of the first replica, of one step action by action.
struct Results {
    std::vector<Value> losses;
    std::vector<Value> sums;
    friend bool operator==(const Results&, const Results&) = default;
};

inline Value batch_value(Value batch, std::uint32_t microbatch) { return mixed(batch, microbatch); }

inline Results results_of(const Values& values) {
    Results results;
    for (const auto& [microbatch, loss] : values.losses) results.losses.push_back(loss);
    for (const auto& [place, sum] : values.sums) {
        if (place.first == 0) results.sums.push_back(sum);
    }
    return results;
}

inline Results reference(const StreamOrder& order, Value batch) {
    Values values(order, false);
    Mixer mixer(order.plan(), values);
    const auto move = [](const Transfers& transfers) {
        for (const Transfer& each : transfers) {
            *std::bit_cast<Value*>(each.to) = *std::bit_cast<const Value*>(each.from);
        }
    };
    for (const Task& task : order.tasks()) {
        if (!order.is_compute(task)) continue;
        values.batch[task.action.microbatch] = batch_value(batch, task.action.microbatch);
        const Mix mix = mixer.mix_of(task.action);
        move(mix.before);
        mix.run();
        move(mix.after);
        move(mix.sent);
    }
    return results_of(values);
}

}  // namespace pykern
