#include "search/anneal.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "search/fuse.hpp"

namespace pykern {

namespace {

// Whether `later` must stay behind `earlier`, which stands before it on the same device.
bool must_follow(const Problem& problem, Labelled earlier, Labelled later) {
    const std::size_t first = stage_of(earlier.symbol);
    const std::size_t second = stage_of(later.symbol);
    const bool same_microbatch = earlier.microbatch == later.microbatch;
    const bool from_forward = op_of(earlier.symbol) == kForward;
    if (problem.forwards_first && from_forward && op_of(later.symbol) != kForward) return true;
    if (first == second) {
        if (earlier.symbol == later.symbol) return true;
        if (is_backward(earlier.symbol) && is_backward(later.symbol)) return true;
        // Gradients add up in ascending order of microbatches, as the plain model's do.
        if (adds_gradients(earlier.symbol) && adds_gradients(later.symbol)) return true;
        if (!same_microbatch) return false;
        return from_forward || (op_of(earlier.symbol) == kInput && op_of(later.symbol) == kWeight);
    }
    if (!same_microbatch || problem.device_of[first] != problem.device_of[second]) return false;
    if (from_forward) return op_of(later.symbol) == kForward && second == first + 1;
    return is_backward(earlier.symbol) && is_backward(later.symbol) && first == second + 1;
}

class Annealer {
   public:
    Annealer(Schedule& schedule, Random& random)
        : schedule_(schedule), random_(random), merges_(schedule.problem().split_has_price()) {}

    Order run(const Cooling& cooling, const Poll& poll, Ticks& best) {
        Order found = schedule_.order();
        best = schedule_.makespan();
        const std::int64_t begin = schedule_.work();
        for (std::uint32_t round = 0; best > cooling.target; ++round) {
            if (round % kRoundsPerPoll == 0) poll();
            const std::int64_t spent = schedule_.work() - begin;
            if (spent >= cooling.work) break;
            const Ticks heat = heat_at(cooling, spent);
            if (!change(schedule_.makespan() + random_.exponential(heat))) continue;
            schedule_.accept();
            path_.clear();
            if (schedule_.makespan() >= best) continue;
            best = schedule_.makespan();
            found = schedule_.order();
        }
        return found;
    }

   private:
    static constexpr std::uint32_t kRoundsPerPoll = 256;

    // Falls as the square of what is left.
    static Ticks heat_at(const Cooling& cooling, std::int64_t spent) {
        const std::int64_t left = 1024 * (cooling.work - spent) / cooling.work;
        return (cooling.hottest * (left * left / 1024)) / 1024;
    }

    bool change(Ticks limit) {
        schedule_.charge(1);  // also where nothing can be moved, so that it comes to an end
        const auto [device, position] = random_.chance(60) ? critical() : anywhere();
        if (merges_ && random_.chance(20)) return fuse_or_split(device, position, limit);
        return random_.chance(50) ? move_later(device, position, limit)
                                  : move_earlier(device, position, limit);
    }

    std::pair<std::size_t, std::size_t> anywhere() {
        const std::size_t device = random_.below(schedule_.problem().num_devices);
        return {device, random_.below(schedule_.row(device).size())};
    }

    std::pair<std::size_t, std::size_t> critical() {
        if (path_.empty()) {
            path_.push_back(schedule_.last());
            while (const auto input =
                       schedule_.critical_input(path_.back().first, path_.back().second)) {
                path_.push_back(*input);
            }
        }
        return path_[random_.below(path_.size())];
    }

    // Mostly short: far moves are rarely legal.
    std::size_t distance() { return 1 + random_.below(random_.chance(70) ? 4 : 24); }

    bool move_later(std::size_t device, std::size_t position, Ticks limit) {
        const auto& row = schedule_.row(device);
        const std::size_t end = std::min(row.size() - 1, position + distance());
        std::size_t to = position;
        while (to < end && !must_follow(schedule_.problem(), row[position], row[to + 1])) ++to;
        if (to == position) return false;
        const auto begin = schedule_.edit(device).begin();
        const auto at = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
        std::rotate(at(position), at(position + 1), at(to + 1));
        return schedule_.try_row(position, to, limit);
    }

    bool move_earlier(std::size_t device, std::size_t position, Ticks limit) {
        const auto& row = schedule_.row(device);
        const std::size_t far = distance();
        const std::size_t end = position > far ? position - far : 0;
        std::size_t to = position;
        while (to > end && !must_follow(schedule_.problem(), row[to - 1], row[position])) --to;
        if (to == position) return false;
        const auto begin = schedule_.edit(device).begin();
        const auto at = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
        std::rotate(at(to), at(position), at(position + 1));
        return schedule_.try_row(to, position, limit);
    }

    // An I and its W become a B, a B becomes I and W.
    bool fuse_or_split(std::size_t device, std::size_t position, Ticks limit) {
        const auto [symbol, microbatch] = schedule_.row(device)[position];
        const std::size_t stage = stage_of(symbol);
        if (op_of(symbol) == kForward) return false;
        std::vector<Labelled>& row = schedule_.edit(device);
        const auto at = [&](std::size_t i) { return row.begin() + static_cast<std::ptrdiff_t>(i); };
        if (op_of(symbol) == kBackward) {
            row[position].symbol = symbol_of(stage, kInput);
            row.insert(at(position + 1), {symbol_of(stage, kWeight), microbatch});
            return schedule_.try_row(position, position + 1, limit);
        }
        const bool from_input = op_of(symbol) == kInput;
        const Labelled other{symbol_of(stage, from_input ? kWeight : kInput), microbatch};
        std::size_t found = position;
        while (row[found] != other) from_input ? ++found : --found;
        const auto [input, weight] = std::minmax(position, found);
        return try_fuse(schedule_, device, input, weight, limit);
    }

    Schedule& schedule_;
    Random& random_;
    const bool merges_;
    std::vector<std::pair<std::size_t, std::size_t>> path_;
};

}  // namespace

Order anneal(Schedule& schedule, Random& random, const Cooling& cooling, const Poll& poll,
             Ticks& best) {
    return Annealer(schedule, random).run(cooling, poll, best);
}

}  // namespace pykern
