// Inputs: the one place that says what an action needs before it may run.
#pragma once

#include <cstdint>

#include "plan/action.hpp"
#include "plan/index.hpp"

namespace pykern {

// Visits the inputs of one action of a plan: those of these actions that the plan holds. A cell is
// a (stage, microbatch, slice). Called for every action of every plan: it neither
// allocates nor visits actions that the plan does not hold.
//
//   F(s, m, j)         F(s-1, m, j); F(s, m, j-1)
//   R                  F and LOAD of the same cell
//   OFFLOAD, LOAD      F of the same cell; OFFLOAD of the same cell
//   B, I (s, m, j)     F, R and LOAD of the same cell; B or I of (s+1, m, j) and of (s, m, j+1)
//   W                  I of the same cell
//   REDUCE(s)          what completes the gradients of s: B or W of every microbatch and slice
//   U(s, m)            B or W of every slice of (s, m); REDUCE(s)
//
// Copies are not actions of a plan; they are derived from it.
template <class Visit>
class InputVisitor {
   public:
    InputVisitor(const Index& index, Visit visit) : index_(index), visit_(visit) {}

    void operator()(Action action) {
        switch (action.kind) {
            case Kind::F:
                if (action.stage > 0) use(Kind::F, action.stage - 1, action);
                if (action.slice > 0) use(Kind::F, action.stage, action, action.slice - 1);
                return;
            case Kind::R:
                use(Kind::F, action.stage, action);
                return use(Kind::LOAD, action.stage, action);
            case Kind::OFFLOAD:
                return use(Kind::F, action.stage, action);
            case Kind::LOAD:
                return use(Kind::OFFLOAD, action.stage, action);
            case Kind::B:
            case Kind::I:
                return backward(action);
            case Kind::W:
                return use(Kind::I, action.stage, action);
            case Kind::REDUCE:
                return reduce(action.stage);
            case Kind::U:
                return update(action);
            case Kind::COPY_F:
            case Kind::COPY_B:
                return;
        }
    }

   private:
    void use(Kind kind, int stage, Action of, int slice) {
        if (!index_.has(kind)) return;
        const Action input{of.microbatch, static_cast<std::uint16_t>(stage), kind,
                           static_cast<std::uint8_t>(slice)};
        const int position = index_.at(input);
        if (position >= 0) visit_(input, position);
    }
    void use(Kind kind, int stage, Action of) { use(kind, stage, of, of.slice); }

    void either(Kind kind, Kind other, int stage, Action of, int slice) {
        use(kind, stage, of, slice);
        use(other, stage, of, slice);
    }

    void backward(Action action) {
        use(Kind::F, action.stage, action);
        use(Kind::R, action.stage, action);
        use(Kind::LOAD, action.stage, action);
        if (action.stage + 1 < index_.num_stages()) {
            either(Kind::B, Kind::I, action.stage + 1, action, action.slice);
        }
        if (action.slice + 1 < index_.num_slices()) {
            either(Kind::B, Kind::I, action.stage, action, action.slice + 1);
        }
    }

    // Everything that adds to the gradients of a stage for the microbatch of this action. Out of
    // line, because few plans have actions that wait for it: in line it slows `check` of all
    // others.
    [[gnu::noinline]] void gradients(int stage, Action of) {
        for (int slice = 0; slice < index_.num_slices(); ++slice) {
            either(Kind::B, Kind::W, stage, of, slice);
        }
    }

    void reduce(int stage) {
        for (int microbatch = 0; microbatch < index_.num_microbatches(); ++microbatch) {
            gradients(stage, Action{.microbatch = static_cast<std::uint32_t>(microbatch)});
        }
    }

    void update(Action action) {
        gradients(action.stage, action);
        use(Kind::REDUCE, action.stage, Action{});
    }

    const Index& index_;
    Visit visit_;
};

// Calls visit(input, its position) for everything that `action` waits for.
template <class Visit>
void for_each_input(Action action, const Index& index, Visit visit) {
    InputVisitor<Visit>(index, visit)(action);
}

}  // namespace pykern
