// The rules that were broken, each told once and collected.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "driver_model/log.hpp"

namespace pykern::fake {

class Violations {
   public:
    explicit Violations(Log& log) : log_(log) {}

    // The function that is running, by a literal: violations begin with it. Answers the former one.
    const char* enter(const char* function) { return std::exchange(function_, function); }
    const char* function() const { return function_; }

    void add(const std::string& text) {
        texts_.push_back(std::string(function_) + ": " + text);
        log_.add("told", texts_.back());
    }
    const std::vector<std::string>& texts() const { return texts_; }
    void forgive() { texts_.clear(); }

   private:
    Log& log_;
    const char* function_ = "";
    std::vector<std::string> texts_;
};

}  // namespace pykern::fake
