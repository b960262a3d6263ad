#include "search/bound.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace pykern {

namespace {

// The earliest moments at which microbatch 0 can reach the stages, going forth and coming back.
struct Paths {
    std::vector<Ticks> there;  // start of F
    std::vector<Ticks> back;   // start of I or B
};

Ticks fastest_back(const Problem& problem, std::size_t stage) {
    return std::min(problem.time[symbol_of(stage, kInput)],
                    problem.time[symbol_of(stage, kBackward)]);
}

// Until the stage's backward has given everything back.
Ticks whole_back(const Problem& problem, std::size_t stage) {
    const Ticks* time = &problem.time[symbol_of(stage, 0)];
    return std::min(time[kInput] + time[kWeight], time[kBackward]);
}

Paths paths_of(const Problem& problem) {
    Paths paths;
    Ticks time = 0;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        paths.there.push_back(time);
        time += problem.time[symbol_of(stage, kForward)] + problem.hop[stage];
    }
    paths.back.resize(problem.num_stages);
    for (std::size_t stage = problem.num_stages; stage-- > 0;) {
        paths.back[stage] = time;
        time += fastest_back(problem, stage) + (stage > 0 ? problem.hop[stage - 1] : 0);
    }
    return paths;
}

// Microbatch 0 there and back, up to the stage whose backward ends last.
Ticks chain(const Problem& problem, const Paths& paths) {
    Ticks end = 0;
    for (std::size_t stage = 0; stage < problem.num_stages; ++stage) {
        end = std::max(end, paths.back[stage] + whole_back(problem, stage));
    }
    return end;
}

// All work of a device behind the first moment at which it has any.
Ticks head_and_work(const Problem& problem, const Paths& paths, std::size_t device) {
    const auto count = static_cast<Ticks>(problem.num_microbatches);
    return paths.there[problem.stages[device].front()] + count * problem.work(device);
}

// Before the first backward can come back to a device, it can run no more forwards than its cap
// holds; everything else comes behind that.
Ticks first_return(const Problem& problem, const Paths& paths, std::size_t device) {
    const auto count = static_cast<Ticks>(problem.num_microbatches);
    Ticks all = 0;
    Ticks longest = 0;
    Ticks smallest = problem.cap[device] + 1;
    for (const std::size_t stage : problem.stages[device]) {
        const Symbol forward = symbol_of(stage, kForward);
        all += count * problem.time[forward];
        longest = std::max(longest, problem.time[forward]);
        smallest = std::min(smallest, problem.takes[forward]);
    }
    const Ticks room = smallest > 0 ? problem.cap[device] / smallest : count;
    const Ticks before = room > all / longest ? all : std::min(all, room * longest);
    return paths.back[problem.stages[device].back()] + count * problem.work(device) - before;
}

// Little's law: what the microbatches hold, summed over time, fits under the cap from the device's
// first action on.
Ticks memory_time(const Problem& problem, const Paths& paths, std::size_t device) {
    double area = 0;
    for (const std::size_t stage : problem.stages[device]) {
        const Symbol forward = symbol_of(stage, kForward);
        const Ticks* takes = &problem.takes[forward];
        const Ticks* time = &problem.time[forward];
        const Ticks wait = paths.back[stage] - paths.there[stage];
        const auto area_of = [&](Symbol op, Ticks until) {
            return -static_cast<double>(takes[op]) * static_cast<double>(until);
        };
        area += std::min(area_of(kInput, wait + time[kInput]) +
                             area_of(kWeight, wait + time[kInput] + time[kWeight]),
                         area_of(kBackward, wait + time[kBackward]));
    }
    const double time = area / static_cast<double>(problem.cap[device]) *
                        static_cast<double>(problem.num_microbatches);
    // Makespans are whole, so up to the next tick, after a hair more than doubles can be wrong.
    return paths.there[problem.stages[device].front()] +
           static_cast<Ticks>(std::ceil(time * (1 - 1e-13)));
}

// Forwards alone: all of a device's behind its first input, and then the rest of the way of the
// last one.
Ticks all_forwards(const Problem& problem, const Paths& paths, std::size_t device) {
    Ticks work = 0;
    for (const std::size_t stage : problem.stages[device]) {
        work += problem.time[symbol_of(stage, kForward)];
    }
    const std::size_t last = problem.stages[device].back();
    const Ticks end = paths.there[last] + problem.time[symbol_of(last, kForward)];
    return paths.there[problem.stages[device].front()] +
           static_cast<Ticks>(problem.num_microbatches) * work + paths.back.back() - end;
}

// Likewise all else. The way behind a device's last action may be as short as nothing where that is
// a W.
Ticks all_backwards(const Problem& problem, const Paths& paths, std::size_t device) {
    Ticks work = problem.work(device);
    bool may_split = false;
    for (const std::size_t stage : problem.stages[device]) {
        work -= problem.time[symbol_of(stage, kForward)];
        may_split = may_split || problem.may_split[stage];
    }
    const std::size_t first = problem.stages[device].front();
    const Ticks end = paths.back[first] + fastest_back(problem, first);
    const Ticks whole = paths.back.front() + fastest_back(problem, 0);
    return paths.back[problem.stages[device].back()] - paths.back.back() +
           static_cast<Ticks>(problem.num_microbatches) * work + (may_split ? 0 : whole - end);
}

// The first backward needs the last stage's forward, in front of which that device has all others,
// and these need all forwards of all devices: one half begins where the other ends.
Ticks halves(const Problem& problem, const Paths& paths) {
    Ticks forwards = 0;
    Ticks backwards = chain(problem, paths) - paths.back.back();
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        forwards = std::max(forwards, all_forwards(problem, paths, device));
        backwards = std::max(backwards, all_backwards(problem, paths, device));
    }
    return forwards + backwards;
}

}  // namespace

Ticks lower_bound(const Problem& problem) {
    const Paths paths = paths_of(problem);
    Ticks bound = chain(problem, paths);
    if (problem.forwards_first) bound = std::max(bound, halves(problem, paths));
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        bound = std::max(
            {bound, head_and_work(problem, paths, device), first_return(problem, paths, device)});
        if (problem.cap[device] > 0) bound = std::max(bound, memory_time(problem, paths, device));
    }
    return bound;
}

}  // namespace pykern
