// Greedy: list scheduling by a handful of rules, swept over their settings.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "search/devices.hpp"
#include "search/order.hpp"

namespace pykern {

struct GreedyRules {
    bool deepest_first;  // of the forwards that are ready, else the oldest microbatch
    bool fused;          // B instead of I and W
    int gap_percent;     // of a W that a gap must measure for the W to fill it
    int yield_percent;   // of an F within which a known backward makes the device wait for it
    int level_percent;   // how far caps of stages are evened out, 0 for by their lifetimes
};

// The settings worth trying, for problems with and without a price of splitting.
std::vector<GreedyRules> greedy_sweep(bool with_fused);

class Greedy {
   public:
    Greedy(Devices& devices, const GreedyRules& rules);

    std::optional<Order> run() { return devices_.run(*this); }
    // For Devices.
    std::optional<Symbol> pick(std::size_t device, Ticks now) const;

   private:
    void share_out(std::size_t device);
    std::optional<Symbol> backward(std::size_t device, Ticks now) const;
    std::optional<Symbol> forward(std::size_t device, Ticks now) const;
    std::optional<Symbol> weight(std::size_t device) const;
    Ticks next_arrival(std::size_t device, Symbol op, Ticks now) const;
    bool may_enter(std::size_t device, std::size_t stage) const;

    Devices& devices_;
    const Problem& problem_;
    GreedyRules rules_;
    Symbol back_;
    // Most microbatches of a stage at once. A device's add up to its cap, and each is at least one,
    // so that no stage can starve the others.
    std::vector<std::size_t> most_;
};

}  // namespace pykern
