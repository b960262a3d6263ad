#include "search/extend.hpp"

#include <cstdlib>
#include <optional>
#include <utility>

namespace pykern {

namespace {

struct Part {
    std::size_t begin;
    std::size_t end;
};

// Slides over a row and counts what a part of it holds.
class Window {
   public:
    Window(const Schedule& schedule, std::size_t device)
        : problem_(schedule.problem()),
          row_(schedule.row(device)),
          stages_(problem_.stages[device]),
          counts_(problem_.time.size(), 0) {}

    // The part from `begin` on, which may only grow, that holds `period` microbatches of
    // everything.
    std::optional<Part> at(std::size_t begin, std::size_t period) {
        while (begin_ < begin) remove(row_[begin_++].symbol);
        while (end_ < row_.size() && forwards_ < period * stages_.size()) add(row_[end_++].symbol);
        // Whole also with what follows the last forward of the part.
        while (end_ < row_.size() && op_of(row_[end_].symbol) != kForward && !holds(period)) {
            add(row_[end_++].symbol);
        }
        if (!holds(period)) return std::nullopt;
        return Part{begin_, end_};
    }

   private:
    bool holds(std::size_t period) const {
        for (const std::size_t stage : stages_) {
            const std::size_t* count = &counts_[symbol_of(stage, 0)];
            if (count[kForward] != period || count[kInput] != count[kWeight] ||
                count[kInput] + count[kBackward] != period) {
                return false;
            }
        }
        return true;
    }
    void add(Symbol symbol) {
        ++counts_[symbol];
        forwards_ += op_of(symbol) == kForward ? 1 : 0;
    }
    void remove(Symbol symbol) {
        --counts_[symbol];
        forwards_ -= op_of(symbol) == kForward ? 1 : 0;
    }

    const Problem& problem_;
    const std::vector<Labelled>& row_;
    const std::vector<std::size_t>& stages_;
    std::vector<std::size_t> counts_;
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    std::size_t forwards_ = 0;
};

// The part that begins nearest to the moment.
std::optional<Part> steady_part(const Schedule& schedule, std::size_t device, std::size_t period,
                                Ticks moment) {
    std::optional<Part> best;
    Ticks nearest = kNever;
    for (std::size_t begin = 0; begin < schedule.row(device).size(); ++begin) {
        const Ticks distance = std::abs(schedule.start(device, begin) - moment);
        if (distance >= nearest) continue;
        Window window(schedule, device);
        const std::optional<Part> part = window.at(begin, period);
        if (!part) continue;
        best = part;
        nearest = distance;
    }
    return best;
}

}  // namespace

Order extend(const Schedule& schedule, std::size_t extra, std::size_t period, Ticks moment) {
    Order order;
    for (std::size_t device = 0; device < schedule.problem().num_devices; ++device) {
        const std::optional<Part> part = steady_part(schedule, device, period, moment);
        if (!part) return {};
        const std::vector<Labelled>& row = schedule.row(device);
        Symbols& symbols = order.rows.emplace_back();
        const auto append = [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) symbols.push_back(row[i].symbol);
        };
        append(0, part->begin);
        for (std::size_t i = 0; i < extra / period; ++i) append(part->begin, part->end);
        append(part->begin, row.size());
    }
    return order;
}

}  // namespace pykern
