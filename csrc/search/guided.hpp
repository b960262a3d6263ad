// Guided: runs an order as fast as its devices allow, ahead of itself where that is safe.
#pragma once

#include <optional>
#include <vector>

#include "search/devices.hpp"
#include "search/order.hpp"

namespace pykern {

// Device by device the planned order, which must keep the cap. While a device's next action waits
// for an input, a later one may run first. Its inputs must be there, it must end before the next
// one can start, and the memory of what it overtakes must stay under the cap with it. So whatever
// runs early, the planned order remains possible, and dispatch cannot run into a corner.
class Guided {
   public:
    explicit Guided(Devices& devices);

    // Nothing where the plan cannot run.
    std::optional<Order> run(const Order& plan);
    // For Devices.
    std::optional<Symbol> pick(std::size_t device, Ticks now);

   private:
    struct Link {
        Symbol symbol;
        std::uint32_t next;
    };

    Ticks next_start(Symbol symbol, Ticks now) const;
    Symbol take(std::size_t device, std::uint32_t before);

    Devices& devices_;
    // The actions of each row that have not run, as a list whose head is element 0.
    std::vector<std::vector<Link>> rows_;
    std::vector<std::uint8_t> passed_;  // per symbol: overtaken in this look ahead
};

}  // namespace pykern
