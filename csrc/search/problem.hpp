// Problem: what a search is about, as flat tables of whole numbers.
//
// Microbatches are alike, so every order can be relabelled to first in, first out per (stage, kind)
// without getting slower (an exchange argument). A row is then a sequence of symbols, one symbol
// per (stage, kind), and the k-th occurrence of a symbol is microbatch k. Times are whole ticks, so
// that sums and comparisons are exact and the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/costs.hpp"
#include "plan/memory.hpp"
#include "plan/placement.hpp"

namespace pykern {

using Ticks = std::int64_t;
using Symbol = std::uint32_t;

// The operations of a stage, in the order of their symbols.
inline constexpr Symbol kForward = 0;
inline constexpr Symbol kInput = 1;
inline constexpr Symbol kWeight = 2;
inline constexpr Symbol kBackward = 3;
inline constexpr Symbol kNumOps = 4;

constexpr std::size_t stage_of(Symbol symbol) { return symbol / kNumOps; }
constexpr Symbol op_of(Symbol symbol) { return symbol % kNumOps; }
constexpr Symbol symbol_of(std::size_t stage, Symbol op) {
    return static_cast<Symbol>(stage) * kNumOps + op;
}
// Whether it hands a gradient to the stage before: I or B.
constexpr bool is_backward(Symbol symbol) {
    return op_of(symbol) == kInput || op_of(symbol) == kBackward;
}

// Whether it adds gradients to those of the microbatches before.
constexpr bool adds_gradients(Symbol symbol) {
    return op_of(symbol) == kWeight || op_of(symbol) == kBackward;
}

// One way to lay the model out, with what it then costs and holds.
struct Candidate {
    Placement placement;
    Costs costs;
    Memory memory;
    // Whether a device runs all its forwards before anything else, as it must where the loss comes
    // from outside.
    bool forwards_first = false;
};

struct Problem {
    std::size_t num_devices = 0;
    std::size_t num_stages = 0;
    std::size_t num_microbatches = 0;
    std::vector<std::size_t> device_of;            // of a stage
    std::vector<std::vector<std::size_t>> stages;  // of a device, ascending
    std::vector<Ticks> time;                       // of a symbol
    std::vector<Ticks> hop;                        // from a stage to the next, 0 on one device
    std::vector<Ticks> takes;                      // memory of a symbol: F takes, the others give
    std::vector<Ticks> cap;                        // of a device
    std::vector<bool> may_split;                   // of a stage, whose I and W have known times
    bool forwards_first = false;                   // as of a candidate
    double ticks_per_ns = 1;                       // a power of two

    // Exact, so that candidates with other ticks can be compared.
    double to_ns(Ticks ticks) const { return static_cast<double>(ticks) / ticks_per_ns; }
    Ticks work(std::size_t device) const;  // of one microbatch, the backward at its cheapest
    // Whether I and W of some stage take longer than its B, so that splitting has a price.
    bool split_has_price() const;
    // Whether each device can hold one microbatch of all its stages, or all microbatches where
    // forwards come first, without which nothing runs.
    bool fits() const;
};

// The one place where a candidate becomes a problem. `caps` are per device, in the unit of the
// memory. Throws std::invalid_argument where a list has the wrong length or a number no sense.
Problem make_problem(const Candidate& candidate, int num_microbatches,
                     const std::vector<double>& caps);

}  // namespace pykern
