#include "plan/text.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <stdexcept>

namespace pykern {

namespace {

constexpr std::array<const char*, kNumKinds> kKindNames = {
    "F", "R", "B", "I", "W", "U", "COPY_F", "COPY_B", "REDUCE", "OFFLOAD", "LOAD"};

// How much of a large plan an error shows on each side of the place.
constexpr std::size_t kDevicesAround = 4;
constexpr std::size_t kActionsAround = 6;

// Half open: the cells [first, last) of the rows [first_row, last_row).
struct Window {
    std::size_t first_row, last_row, first, last;
};

std::size_t widest(const Plan& plan, const Window& window) {
    std::size_t width = 1;
    for (std::size_t row = window.first_row; row < window.last_row; ++row) {
        const Row& actions = plan.rows()[row];
        for (std::size_t i = window.first; i < std::min(window.last, actions.size()); ++i) {
            width = std::max(width, to_text(actions[i]).size());
        }
    }
    return width;
}

std::string padded(std::string text, std::size_t width) {
    text.resize(std::max(width, text.size()), ' ');
    return text;
}

std::string head_of(std::size_t device, std::size_t num_devices) {
    const std::size_t width = std::to_string(num_devices - 1).size();
    return "device " + padded(std::to_string(device), width) + " |";
}

std::string line_of(const Plan& plan, std::size_t device, const Window& window, std::size_t width) {
    const Row& row = plan.rows()[device];
    std::string line = head_of(device, plan.rows().size());
    if (window.first > 0) line += " ...";
    for (std::size_t i = window.first; i < std::min(window.last, row.size()); ++i) {
        line += " " + padded(to_text(row[i]), width);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    if (window.last < row.size()) line += " ...";
    return line;
}

std::int64_t read_number(std::string_view digits) {
    const bool canonical = !digits.empty() && (digits[0] != '0' || digits.size() == 1);
    std::int64_t value = -1;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool whole = result.ec == std::errc{} && result.ptr == digits.data() + digits.size();
    return canonical && whole ? value : -1;
}

}  // namespace

const char* kind_name(Kind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::string to_text(Action action) {
    std::string text =
        std::to_string(action.stage) + kind_name(action.kind) + std::to_string(action.microbatch);
    if (action.slice > 0) text += "." + std::to_string(action.slice);
    return text;
}

Action parse_action(std::string_view text) {
    const std::string_view whole = text;
    std::int64_t slice = 0;
    if (const std::size_t dot = text.find('.'); dot != std::string_view::npos) {
        slice = read_number(text.substr(dot + 1));
        if (slice == 0) slice = -1;  // the first slice is written without its number
        text = text.substr(0, dot);
    }
    const std::size_t name_start = std::min(text.find_first_not_of("0123456789"), text.size());
    const std::size_t last_letter = text.find_last_not_of("0123456789");
    const std::size_t name_end = last_letter == std::string_view::npos ? 0 : last_letter + 1;
    const std::string_view name =
        name_end > name_start ? text.substr(name_start, name_end - name_start) : "";
    const auto* found = std::ranges::find(kKindNames, name);
    if (found != kKindNames.end()) {
        const std::int64_t stage = read_number(text.substr(0, name_start));
        const std::int64_t microbatch = read_number(text.substr(name_end));
        if (stage >= 0 && microbatch >= 0 && slice >= 0) {
            return make_action(static_cast<Kind>(found - kKindNames.begin()), stage, microbatch,
                               slice);
        }
    }
    throw std::invalid_argument(
        "an action must be stage, kind, microbatch, like \"2F0\", or with a slice \"2F0.1\", got "
        "\"" +
        std::string(whole.substr(0, 40)) + "\"");
}

std::string table(const Plan& plan) {
    const Window all{0, plan.rows().size(), 0, SIZE_MAX};
    const std::size_t width = widest(plan, all);
    std::string lines;
    for (std::size_t device = 0; device < all.last_row; ++device) {
        if (device > 0) lines += '\n';
        lines += line_of(plan, device, all, width);
    }
    return lines;
}

std::string table_at(const Plan& plan, int device, std::size_t position) {
    const auto marked = static_cast<std::size_t>(device);
    const Window window{marked - std::min(marked, kDevicesAround),
                        std::min(marked + kDevicesAround + 1, plan.rows().size()),
                        position - std::min(position, kActionsAround),
                        position + kActionsAround + 1};
    const std::size_t width = widest(plan, window);
    std::string lines;
    for (std::size_t row = window.first_row; row < window.last_row; ++row) {
        if (row > window.first_row) lines += '\n';
        lines += line_of(plan, row, window, width);
        if (row != marked) continue;
        const std::size_t indent = head_of(row, plan.rows().size()).size() +
                                   (window.first > 0 ? 4 : 0) +
                                   (position - window.first) * (width + 1) + 1;
        lines += '\n';
        lines.append(indent, ' ').append("^ here");
    }
    return lines;
}

}  // namespace pykern
