#include "plan/by_program.hpp"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "plan/check.hpp"
#include "plan/require.hpp"

namespace pykern {

namespace {

constexpr int kAnyChunk = -1;

struct Word {
    Kind kind;
    int chunk;
    // Shares its slot with the word behind it.
    bool pairs = false;
};

[[noreturn]] void refuse(const std::string& word, int num_chunks) {
    throw std::invalid_argument("a pattern's word must be F, B, I or W and a chunk, 0 to " +
                                std::to_string(num_chunks - 1) +
                                ", W alone, or two joined by &, got " + word);
}

std::optional<Kind> kind_of(char letter) {
    switch (letter) {
        case 'F':
            return Kind::F;
        case 'B':
            return Kind::B;
        case 'I':
            return Kind::I;
        case 'W':
            return Kind::W;
        default:
            return std::nullopt;
    }
}

Word parse_word(const std::string& text, int num_chunks) {
    const std::optional<Kind> kind = text.empty() ? std::nullopt : kind_of(text[0]);
    if (!kind) refuse(text, num_chunks);
    if (text == "W") return {*kind, kAnyChunk};
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        if (text.substr(1) == std::to_string(chunk)) return {*kind, chunk};
    }
    refuse(text, num_chunks);
}

std::vector<Word> parse_pattern(const std::string& pattern, int num_chunks) {
    std::vector<Word> words;
    std::istringstream stream(pattern);
    for (std::string text; stream >> text;) {
        const std::size_t both = text.find('&');
        words.push_back(parse_word(text.substr(0, both), num_chunks));
        if (both == std::string::npos) continue;
        words.back().pairs = true;
        words.push_back(parse_word(text.substr(both + 1), num_chunks));
    }
    return words;
}

// Writes one device's row.
class Writer {
   public:
    Writer(const std::vector<int>& stages, int num_microbatches)
        : stages_(stages),
          num_microbatches_(num_microbatches),
          forwards_(stages.size(), 0),
          backwards_(stages.size(), 0) {}

    // Returns whether any of the words stood for an action.
    bool write(const std::vector<Word>& words) {
        const std::size_t before = row.size();
        bool pairs = false;
        for (const Word& word : words) {
            const std::optional<Action> action = next(word);
            if (pairs && action) overlaps.push_back(row.size() - 1);
            pairs = word.pairs && action;
            if (action) row.push_back(*action);
        }
        return row.size() > before;
    }

    Row row;
    Overlaps overlaps;

   private:
    std::optional<Action> next(const Word& word) {
        if (word.kind == Kind::W) return next_weight(word.chunk);
        const auto chunk = static_cast<std::size_t>(word.chunk);
        int& microbatch = (word.kind == Kind::F ? forwards_ : backwards_)[chunk];
        if (microbatch == num_microbatches_) return std::nullopt;
        const Action action = make_action(word.kind, stages_[chunk], microbatch++);
        if (word.kind == Kind::I) waiting_.push_back(action);
        return action;
    }

    std::optional<Action> next_weight(int chunk) {
        const auto found = std::ranges::find_if(waiting_, [&](Action input) {
            return chunk == kAnyChunk || input.stage == stages_[static_cast<std::size_t>(chunk)];
        });
        if (found == waiting_.end()) return std::nullopt;
        Action action = *found;
        action.kind = Kind::W;
        waiting_.erase(found);
        return action;
    }

    const std::vector<int>& stages_;
    int num_microbatches_;
    std::vector<int> forwards_;
    std::vector<int> backwards_;
    std::deque<Action> waiting_;
};

}  // namespace

Plan by_program(const Placement& placement, int num_microbatches,
                const std::vector<std::vector<Phase>>& programs) {
    require_plan_size(placement.num_stages(), num_microbatches);
    require_range("number of programs", static_cast<std::int64_t>(programs.size()),
                  placement.num_devices(), placement.num_devices());
    const std::vector<std::vector<int>> stages = placement.stages_by_device();
    std::vector<Row> rows;
    std::vector<Overlaps> overlaps;
    for (std::size_t device = 0; device < programs.size(); ++device) {
        Writer writer(stages[device], num_microbatches);
        for (const auto& [times, pattern] : programs[device]) {
            require_range("times of a phase", times, 0, kMaxCells);
            const auto words = parse_pattern(pattern, static_cast<int>(stages[device].size()));
            // A pass that writes nothing changes nothing, so neither would those after it.
            int passes = 0;
            while (passes < times && writer.write(words)) ++passes;
        }
        rows.push_back(std::move(writer.row));
        overlaps.push_back(std::move(writer.overlaps));
    }
    return checked({placement, num_microbatches, std::move(rows), 1, std::move(overlaps)});
}

}  // namespace pykern
