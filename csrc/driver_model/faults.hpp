// Calls counted by function, and those that a test lets fail.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cuda/api.hpp"

namespace pykern::fake {

class Faults {
   public:
    // The nth call of the function from now on, 1 being the next.
    void plan(const std::string& function, int nth, cuda::CUresult error, bool sticky) {
        planned_[function] = {calls(function) + static_cast<std::uint64_t>(nth), error, sticky};
    }

    // Counts a call, and says how it fails.
    cuda::CUresult next(const std::string& function) {
        const std::uint64_t number = ++calls_[function];
        const auto planned = planned_.find(function);
        if (sticky_ != cuda::kSuccess) return sticky_;
        if (planned == planned_.end() || planned->second.number != number) return cuda::kSuccess;
        if (planned->second.sticky) sticky_ = planned->second.error;
        return planned->second.error;
    }

    // The error that every call has from now on.
    cuda::CUresult sticky() const { return sticky_; }

    std::uint64_t calls(const std::string& function) const {
        const auto found = calls_.find(function);
        return found == calls_.end() ? 0 : found->second;
    }

   private:
    struct Planned {
        std::uint64_t number;
        cuda::CUresult error;
        bool sticky;
    };
    std::map<std::string, Planned> planned_;
    std::map<std::string, std::uint64_t> calls_;
    cuda::CUresult sticky_ = cuda::kSuccess;
};

}  // namespace pykern::fake
