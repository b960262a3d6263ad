// SlotLane: one device's slots in a timetable, whose actions move to earlier slots.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "plan/action.hpp"
#include "plan/plan.hpp"

namespace pykern {

// Any free slot is W's: the oldest I that waits by then takes it.
inline constexpr Action kFree{.kind = Kind::W};

// The effects of successive slots on a device. I let W wait, and free slots take one each while any
// waits; F add to what is in flight, and W take away from it.
struct SlotSpan {
    static constexpr int kNothing = std::numeric_limits<int>::min() / 2;

    int walk = 0;  // I less free slots
    // The least of that in front of any slot and at the end: Ws that may be missing.
    int lowest = 0;
    int rise = 0;  // F less free slots
    // Most in flight in any slot, if nothing was before: where every free slot has a W, and where
    // nothing waits at first.
    int busiest = kNothing;
    int most = kNothing;

    void add(Kind kind) {
        if (kind == Kind::F) ++rise;
        busiest = std::max(busiest, rise);
        most = std::max(most, rise - lowest);
        if (kind == Kind::F) return;
        const bool waits = kind == Kind::I;
        walk += waits ? 1 : -1;
        lowest = std::min(lowest, walk);
        if (!waits) --rise;
    }

    // The Ws that wait behind the span, if none did before.
    int waiting() const { return walk - lowest; }

    friend SlotSpan operator+(const SlotSpan& one, const SlotSpan& next) {
        return {.walk = one.walk + next.walk,
                .lowest = std::min(one.lowest, one.walk + next.lowest),
                .rise = one.rise + next.rise,
                .busiest = std::max(one.busiest, one.rise + next.busiest),
                .most = std::max({one.most, one.rise + next.busiest - one.lowest,
                                  one.rise + next.most - one.walk})};
    }
};

// Sums over blocks of slots, and over pairs of these and so on: a move changes a few of them,
// however far it is.
class SlotLane {
   public:
    explicit SlotLane(std::size_t num_slots)
        : slots_(num_slots, kFree), num_leaves_(std::bit_ceil((num_slots + kBlock - 1) / kBlock)) {}

    Action at(std::size_t slot) const { return slots_[slot]; }
    bool is_free(std::size_t slot) const { return slots_[slot] == kFree; }
    void put(std::size_t slot, Action action) {
        slots_[slot] = action;
        if (action.kind == Kind::F) last_forward_ = std::max(last_forward_, slot);
    }
    // Whether a forward was put into this slot or behind it.
    bool goes_on(std::size_t slot) const { return slot <= last_forward_; }

    // To be called when all actions stand, before any of the functions below.
    void settle() {
        spans_.assign(2 * num_leaves_, {});
        for (std::size_t leaf = 0; leaf * kBlock < slots_.size(); ++leaf) {
            spans_[num_leaves_ + leaf] = span_of(leaf * kBlock, (leaf + 1) * kBlock);
        }
        for (std::size_t node = num_leaves_; node-- > 1;) sum(node);
    }

    // The most that is in flight.
    int peak() const { return spans_[1].most; }

    // Whether not even W takes the slot.
    bool is_idle(std::size_t slot) const { return is_free(slot) && before(slot).waiting() == 0; }

    // Moves the action of slot `from` to the free slot `to` before it, unless more than `peak`
    // would then be in flight. Behind `from` it is never more than it was: no W comes later there.
    bool move(std::size_t from, std::size_t to, int peak) {
        swap(from, to);
        if (spans_[1].most <= peak) return true;
        swap(from, to);
        return false;
    }

    Row row() const {
        Row row;
        Row inputs;
        std::size_t issued = 0;
        const auto weight = [&] {
            row.push_back(inputs[issued++]);
            row.back().kind = Kind::W;
        };
        for (const Action action : slots_) {
            if (action != kFree) row.push_back(action);
            if (action.kind == Kind::I) inputs.push_back(action);
            if (action == kFree && issued < inputs.size()) weight();
        }
        while (issued < inputs.size()) weight();
        return row;
    }

   private:
    static constexpr std::size_t kBlock = 64;

    SlotSpan span_of(std::size_t begin, std::size_t end) const {
        SlotSpan span;
        end = std::min(end, slots_.size());
        for (std::size_t slot = begin; slot < end; ++slot) span.add(slots_[slot].kind);
        return span;
    }

    void sum(std::size_t node) { spans_[node] = spans_[2 * node] + spans_[2 * node + 1]; }

    void swap(std::size_t from, std::size_t to) {
        std::swap(slots_[from], slots_[to]);
        for (const std::size_t block : {from / kBlock, to / kBlock}) {
            std::size_t node = num_leaves_ + block;
            spans_[node] = span_of(block * kBlock, (block + 1) * kBlock);
            while ((node /= 2) > 0) sum(node);
        }
    }

    // All slots in front of this one.
    SlotSpan before(std::size_t slot) const {
        SlotSpan behind = span_of(slot / kBlock * kBlock, slot);
        for (std::size_t node = num_leaves_ + slot / kBlock; node > 1; node /= 2) {
            if (node % 2 == 1) behind = spans_[node - 1] + behind;
        }
        return behind;
    }

    std::vector<Action> slots_;
    std::size_t num_leaves_;
    // By node of a binary tree: the first is the root, the last ones are blocks of slots.
    std::vector<SlotSpan> spans_;
    std::size_t last_forward_ = 0;
};

}  // namespace pykern
