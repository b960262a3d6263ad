// Plans as tests write them: one string of actions per device.
#pragma once

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.hpp"
#include "plan/text.hpp"

namespace pykern {

inline Plan plan_of(Placement placement, int num_microbatches,
                    const std::vector<std::string>& lines) {
    std::vector<Row> rows;
    for (const std::string& line : lines) {
        Row& row = rows.emplace_back();
        std::istringstream words(line);
        for (std::string word; words >> word;) row.push_back(parse_action(word));
    }
    return {std::move(placement), num_microbatches, std::move(rows)};
}

}  // namespace pykern
