// A small plan of every form that the generators make.
#pragma once

#include <string>
#include <vector>

#include "plan/by_block.hpp"
#include "plan/by_list.hpp"
#include "plan/by_program.hpp"
#include "plan/generate.hpp"
#include "plan/recompute.hpp"
#include "plan/reduce.hpp"

namespace pykern {

struct NamedPlan {
    std::string name;
    Plan plan;
};

// ZB-V and DualPipe-V, as schedules/zb_v.py and schedules/dualpipe_v.py write them.
inline Plan zero_bubble_v() {
    return by_program(Placement::wave(2, 1), 4,
                      {{{3, "F0"}, {2, "F1 I1 W1"}, {2, "F0 I0 W0 F1 I1 W1"}, {2, "I0 W0"}},
                       {{1, "F0"},
                        {1, "F1 F0"},
                        {1, "F1 I1 W1"},
                        {2, "F0 I0 W0 F1 I1 W1"},
                        {1, "I0 I1"},
                        {1, "I0 W0"},
                        {1, "W1"},
                        {1, "W0"}}});
}

inline Plan overlapped() {
    return by_program(Placement::wave(2, 1), 4,
                      {{{2, "F0"},
                        {1, "F0 F1"},
                        {1, "I1 W F1"},
                        {1, "F0&B1 F1&B0"},
                        {1, "B1 F1&B0"},
                        {1, "B1 I0"},
                        {1, "W I0"},
                        {1, "W"}},
                       {{2, "F0 F1"},
                        {1, "F0 B1 F1&B0"},
                        {1, "F0&B1 F1&B0"},
                        {1, "B1 B0"},
                        {1, "I1 I0"},
                        {2, "W"}}});
}

// Every cell of it that can be.
inline Plan recomputed(const Plan& plan) {
    std::vector<Action> cells;
    for (const Row& row : plan.rows()) {
        for (const Action& action : row) {
            if (action.kind == Kind::F) cells.push_back(with_kind(action, Kind::R));
        }
    }
    return with_recompute(plan, cells, Costs(1.0, 2.0));
}

inline std::vector<NamedPlan> plans_of_all_forms() {
    return {
        {"one device", by_slots(Placement::linear(1), 3, 1, 2)},
        {"1F1B", by_slots(Placement::linear(3), 5, 1, 2)},
        {"GPipe", by_phases(Placement::linear(3), 4, {4, 4, 4}, 4)},
        {"interleaved", by_phases(Placement::looped(2, 2), 4, {4, 2}, 2)},
        {"Hanayo", by_slots(Placement::wave(2, 2), 5, 2, 16)},
        {"Hanayo by list", by_list(by_slots(Placement::wave(3, 1), 5, 3, 6), 6)},
        {"Chimera", with_reductions(by_slots(Placement::bidirectional(4), 6, 2, 8))},
        {"ZB-H1", by_phases(Placement::linear(3), 5, {2, 1, 0}, 5, {0, 1, 2})},
        {"ZB-V", zero_bubble_v()},
        {"V-Half", by_block(Placement::wave(2, 1), 5, {0, 2, 3, 4}, {13, 12, 10, 8}, 6)},
        {"overlapped", overlapped()},
        {"1F1B recomputed", recomputed(by_slots(Placement::linear(3), 5, 1, 2))},
        {"Chimera recomputed",
         recomputed(with_reductions(by_slots(Placement::bidirectional(2), 4, 1, 4)))},
        {"overlapped, recomputed", recomputed(overlapped())},
        {"forward only", by_slots(Placement::looped(2, 2), 4, 2, 8).forward_only()},
    };
}

}  // namespace pykern
