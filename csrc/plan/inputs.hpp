// Inputs: the one place that says what an action needs before it may run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plan/action.hpp"

namespace pykern {

// At most two actions, in a fixed array: this is called for every action of every plan.
class Inputs {
   public:
    void add(Kind kind, std::uint16_t stage, std::uint32_t microbatch) {
        actions_[size_++] = Action{microbatch, stage, kind};
    }
    const Action* begin() const { return actions_.data(); }
    const Action* end() const { return actions_.data() + size_; }

   private:
    std::array<Action, 2> actions_{};
    std::size_t size_ = 0;
};

// What `action` waits for in a model of `num_stages` stages whose backward is whole:
//   F(s, m) needs F(s-1, m);  B(s, m) needs F(s, m) and B(s+1, m).
inline Inputs inputs_of(Action action, int num_stages) {
    Inputs inputs;
    if (action.kind == Kind::F && action.stage > 0) {
        inputs.add(Kind::F, static_cast<std::uint16_t>(action.stage - 1), action.microbatch);
    }
    if (action.kind == Kind::B) {
        inputs.add(Kind::F, action.stage, action.microbatch);
        if (action.stage + 1 < num_stages) {
            inputs.add(Kind::B, static_cast<std::uint16_t>(action.stage + 1), action.microbatch);
        }
    }
    return inputs;
}

}  // namespace pykern
