#include "search/schedule.hpp"

#include <algorithm>

namespace pykern {

namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

}  // namespace

Schedule::Schedule(const Problem& problem)
    : problem_(problem),
      writes_(problem.time.size(), kNone),
      reads_(problem.time.size(), kNone),
      read_hop_(problem.time.size(), 0),
      reader_(problem.time.size(), kNone),
      tail_(problem.time.size(), 0),
      rows_(problem.num_devices),
      starts_(problem.num_devices),
      held_(problem.num_devices),
      left_(problem.num_devices),
      accepted_(2 * problem.num_stages * problem.num_microbatches),
      tried_(accepted_.size()),
      tried_starts_(problem.num_devices),
      next_(problem.num_devices),
      from_(problem.num_devices),
      clock_(problem.num_devices),
      to_do_(problem.num_devices),
      queued_(problem.num_devices) {
    fill_tables();
    fill_tails();
    std::size_t longest = 0;
    for (std::size_t device = 0; device < problem.num_devices; ++device) {
        const std::size_t length = 3 * problem.stages[device].size() * problem.num_microbatches;
        longest = std::max(longest, length);
        rows_[device].reserve(length);
        starts_[device].resize(length);
        tried_starts_[device].resize(length);
        held_[device].resize(length + 1);
        left_[device].resize(length + 1);
    }
    edit_.reserve(longest);
    queue_.reserve(problem.num_devices);
}

void Schedule::fill_tables() {
    const std::size_t num_stages = problem_.num_stages;
    const std::size_t num_microbatches = problem_.num_microbatches;
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        const Symbol forward = symbol_of(stage, kForward);
        writes_[forward] = stage * num_microbatches;
        if (stage > 0) reads_[forward] = writes_[forward] - num_microbatches;
        if (stage > 0) read_hop_[forward] = problem_.hop[stage - 1];
        if (stage + 1 < num_stages) reader_[forward] = problem_.device_of[stage + 1];
        for (const Symbol op : {kInput, kBackward}) {
            const Symbol backward = symbol_of(stage, op);
            const bool at_end = stage + 1 == num_stages;
            writes_[backward] = (num_stages + stage) * num_microbatches;
            reads_[backward] = at_end ? writes_[forward] : writes_[backward] + num_microbatches;
            read_hop_[backward] = problem_.hop[stage];
            if (stage > 0) reader_[backward] = problem_.device_of[stage - 1];
        }
    }
}

void Schedule::fill_tails() {
    const std::size_t num_stages = problem_.num_stages;
    Ticks back = 0;  // from the first backward of a stage's input to the end of the step
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
        const Ticks* time = &problem_.time[symbol_of(stage, 0)];
        const Ticks hop = stage > 0 ? problem_.hop[stage - 1] : 0;
        tail_[symbol_of(stage, kWeight)] = time[kWeight];
        tail_[symbol_of(stage, kInput)] = time[kInput] + std::max(time[kWeight], hop + back);
        tail_[symbol_of(stage, kBackward)] = time[kBackward] + (stage > 0 ? hop + back : 0);
        back = std::min(tail_[symbol_of(stage, kInput)], tail_[symbol_of(stage, kBackward)]);
    }
    for (std::size_t stage = num_stages; stage-- > 0;) {
        const Symbol forward = symbol_of(stage, kForward);
        const bool at_end = stage + 1 == num_stages;
        tail_[forward] =
            problem_.time[forward] +
            (at_end ? back : problem_.hop[stage] + tail_[symbol_of(stage + 1, kForward)]);
    }
}

bool Schedule::load(const Order& order) {
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        if (!label(problem_, device, order.rows[device], rows_[device])) return false;
        if (!weigh(device, 0)) return false;
        std::ranges::fill(starts_[device], 0);
    }
    std::ranges::fill(accepted_, Times{kNever, kNever, 0, 0});
    std::ranges::fill(tried_, Times{0, 0, 0, 0});
    trial_ = 0;
    edited_ = 0;
    edit_ = rows_[0];
    rewind(0, 0);
    if (!time_from(0, kNever)) return false;
    accept();
    return true;
}

// Memory and work of a row's positions from `first` on. False where the cap is broken.
bool Schedule::weigh(std::size_t device, std::size_t first) {
    const std::vector<Labelled>& row = rows_[device];
    Ticks held = first == 0 ? 0 : held_[device][first];
    for (std::size_t position = first; position < row.size(); ++position) {
        held_[device][position] = held;
        held += problem_.takes[row[position].symbol];
        if (held > problem_.cap[device]) return false;
    }
    held_[device][row.size()] = held;
    left_[device][row.size()] = 0;
    for (std::size_t position = row.size(); position-- > 0;) {
        left_[device][position] = left_[device][position + 1] + problem_.time[row[position].symbol];
    }
    return true;
}

Ticks Schedule::peak(std::size_t device) const {
    const auto& held = held_[device];
    return *std::max_element(held.begin(),
                             held.begin() + static_cast<std::ptrdiff_t>(rows_[device].size() + 1));
}

Order Schedule::order() const {
    Order order;
    for (const auto& row : rows_) {
        Symbols& symbols = order.rows.emplace_back();
        symbols.reserve(row.size());
        for (const Labelled& action : row) symbols.push_back(action.symbol);
    }
    return order;
}

Ticks Schedule::pace() const {
    const std::size_t quarter = problem_.num_microbatches / 4;
    if (quarter == 0) return makespan_;
    const Times* backwards = &accepted_[writes_[symbol_of(0, kInput)]];
    return (backwards[3 * quarter].end - backwards[quarter].end) / static_cast<Ticks>(2 * quarter);
}

std::optional<std::pair<std::size_t, std::size_t>> Schedule::critical_input(
    std::size_t device, std::size_t position) const {
    const Ticks start = starts_[device][position];
    if (position > 0 && end(device, position - 1) == start) return {{device, position - 1}};
    const Labelled action = rows_[device][position];
    if (start == 0 || reads_[action.symbol] == kNone) return std::nullopt;
    const Symbol symbol = action.symbol;
    const std::size_t stage = stage_of(symbol);
    const bool turns = is_backward(symbol) && stage + 1 == problem_.num_stages;
    std::size_t source = is_backward(symbol) ? stage + 1 : stage - 1;
    if (turns) source = stage;
    return {{problem_.device_of[source], accepted_[reads_[symbol] + action.microbatch].position}};
}

std::pair<std::size_t, std::size_t> Schedule::last() const {
    std::size_t last = 0;
    for (std::size_t device = 1; device < problem_.num_devices; ++device) {
        if (end(device, rows_[device].size() - 1) > end(last, rows_[last].size() - 1)) {
            last = device;
        }
    }
    return {last, rows_[last].size() - 1};
}

std::vector<Labelled>& Schedule::edit(std::size_t device) {
    edited_ = device;
    edit_ = rows_[device];
    return edit_;
}

bool Schedule::try_row(std::size_t first, std::size_t last, Ticks limit) {
    work_ += static_cast<std::int64_t>(last - first) / 4 + 4;
    if (!within_cap(first, last)) return false;
    const Ticks moment = first == 0 ? 0 : end(edited_, first - 1);
    rewind(moment, first);
    const std::size_t old_last = last + rows_[edited_].size() - edit_.size();
    to_do_[edited_] = left_[edited_][old_last + 1];
    for (std::size_t i = first; i <= last; ++i) to_do_[edited_] += problem_.time[edit_[i].symbol];
    return time_from(moment, limit);
}

bool Schedule::within_cap(std::size_t first, std::size_t last) const {
    Ticks held = held_[edited_][first];
    for (std::size_t i = first; i <= last; ++i) {
        held += problem_.takes[edit_[i].symbol];
        if (held > problem_.cap[edited_]) return false;
    }
    return true;
}

// Puts every device where it stood at `moment`, the edited one before `first`.
void Schedule::rewind(Ticks moment, std::size_t first) {
    ++trial_;
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        const auto begin = starts_[device].begin();
        const auto size = static_cast<std::ptrdiff_t>(rows_[device].size());
        const auto at = std::lower_bound(begin, begin + size, moment);
        const std::size_t next = device == edited_ ? first : static_cast<std::size_t>(at - begin);
        from_[device] = next_[device] = next;
        clock_[device] = next == 0 ? 0 : end(device, next - 1);
        to_do_[device] = left_[device][next];
    }
}

bool Schedule::time_from(Ticks moment, Ticks limit) {
    queue_.clear();
    for (std::size_t device = problem_.num_devices; device-- > 0;) {
        queue_.push_back(device);
        queued_[device] = 1;
    }
    while (!queue_.empty()) {
        const std::size_t device = queue_.back();
        queue_.pop_back();
        queued_[device] = 0;
        if (!run_row(device, moment, limit)) return false;
    }
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        if (next_[device] != tried_row(device).size()) return false;
    }
    tried_makespan_ = *std::ranges::max_element(clock_);
    return true;
}

// Runs a device until it waits for another one. False where the limit cannot be met any more.
bool Schedule::run_row(std::size_t device, Ticks moment, Ticks limit) {
    const std::vector<Labelled>& row = tried_row(device);
    std::size_t next = next_[device];
    const std::size_t began = next;
    Ticks clock = clock_[device];
    Ticks to_do = to_do_[device];
    bool in_time = true;
    for (; next < row.size(); ++next) {
        const auto [symbol, microbatch] = row[next];
        Ticks start = clock;
        if (reads_[symbol] != kNone) {
            const std::size_t cell = reads_[symbol] + microbatch;
            const Times& input = tried_[cell].trial == trial_ ? tried_[cell] : accepted_[cell];
            if (input.trial != trial_ && input.start >= moment) break;
            start = std::max(start, input.end + read_hop_[symbol]);
        }
        in_time = start + std::max(to_do, tail_[symbol]) <= limit;
        if (!in_time) break;
        clock = start + problem_.time[symbol];
        to_do -= problem_.time[symbol];
        tried_starts_[device][next] = start;
        if (writes_[symbol] == kNone) continue;
        tried_[writes_[symbol] + microbatch] = {start, clock, trial_,
                                                static_cast<std::uint32_t>(next)};
        const std::size_t reader = reader_[symbol];
        if (reader == kNone || reader == device || queued_[reader] != 0) continue;
        queued_[reader] = 1;
        queue_.push_back(reader);
    }
    work_ += static_cast<std::int64_t>(next - began);
    next_[device] = next;
    clock_[device] = clock;
    to_do_[device] = to_do;
    return in_time;
}

void Schedule::accept() {
    std::swap(rows_[edited_], edit_);
    for (std::size_t device = 0; device < problem_.num_devices; ++device) {
        const std::vector<Labelled>& row = rows_[device];
        for (std::size_t position = from_[device]; position < row.size(); ++position) {
            starts_[device][position] = tried_starts_[device][position];
            const Symbol symbol = row[position].symbol;
            if (writes_[symbol] == kNone) continue;
            const std::size_t cell = writes_[symbol] + row[position].microbatch;
            accepted_[cell] = tried_[cell];
        }
    }
    weigh(edited_, from_[edited_]);
    makespan_ = tried_makespan_;
}

}  // namespace pykern
