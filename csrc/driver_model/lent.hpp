// Bytes of the host that work under way reads: the host may not change them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "driver_model/bytes.hpp"
#include "driver_model/memory.hpp"

namespace pykern::fake {

// A change is seen at the host's next wait, or at the end, and not where the same bytes are
// written.
class Lent {
   public:
    explicit Lent(Violations& violations) : violations_(violations) {}

    void lend(const Site& to, cuda::CUdeviceptr address, std::size_t bytes) {
        loans_.push_back({to, address, {bytes_at(address), bytes_at(address) + bytes}});
    }

    void check() {
        std::erase_if(loans_, [&](const Loan& loan) {
            const bool changed = !std::ranges::equal(
                loan.bytes, std::span(bytes_at(loan.address), loan.bytes.size()));
            if (changed) {
                violations_.add("the host has changed bytes that " + text_of(loan.to) +
                                " reads, and has not waited for it");
            }
            return changed;
        });
    }

    // The host knows that this work is done.
    void give_back(const Clock& clock) {
        check();
        std::erase_if(loans_, [&](const Loan& loan) { return clock.covers(loan.to.point); });
    }

    // Work will write there, which the driver orders, or not.
    void give_back(const FakeAccess& access) {
        check();
        std::erase_if(loans_, [&](const Loan& loan) {
            return loan.address < access.address + access.bytes &&
                   access.address < loan.address + loan.bytes.size();
        });
    }

   private:
    struct Loan {
        Site to;
        cuda::CUdeviceptr address;
        std::vector<std::byte> bytes;
    };

    Violations& violations_;
    std::vector<Loan> loans_;
};

}  // namespace pykern::fake
