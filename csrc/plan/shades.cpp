#include "plan/shades.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>

namespace pykern {

Shades::Shades(const Timeline& timeline) {
    std::vector<std::pair<std::uint32_t, Place>> all;
    for (int device = 0; device < timeline.num_devices(); ++device) {
        const auto start = static_cast<std::ptrdiff_t>(all.size());
        for (const Span& span : timeline.rows()[static_cast<std::size_t>(device)]) {
            all.emplace_back(span.action.microbatch, Place{device, span.action.stage});
        }
        // One place is kept for all actions of a microbatch in a stage. Device by device, the list
        // stays short.
        std::sort(all.begin() + start, all.end());
        all.erase(std::unique(all.begin() + start, all.end()), all.end());
    }
    std::ranges::sort(all);
    std::map<std::vector<Place>, std::size_t> replicas;
    for (auto first = all.begin(); first != all.end();) {
        std::vector<Place> places;
        auto last = first;
        for (; last != all.end() && last->first == first->first; ++last) {
            places.push_back(last->second);
        }
        const auto [known, is_new] = replicas.try_emplace(places, replicas.size());
        if (is_new) add_replica(places);
        replica_of_.emplace(first->first, known->second);
        first = last;
    }
    num_replicas_ = std::max(1, static_cast<int>(chunks_.size()));
}

void Shades::add_replica(const std::vector<Place>& places) {
    std::vector<Chunk>& chunks = chunks_.emplace_back();
    chunks.reserve(places.size());
    for (const Place place : places) {
        const bool same_device = !chunks.empty() && chunks.back().place.device == place.device;
        chunks.push_back({.place = place, .number = same_device ? chunks.back().number + 1 : 0});
        num_chunks_ = std::max(num_chunks_, chunks.back().number + 1);
    }
}

int Shades::shade_of(int device, Action action) const {
    const std::size_t replica = replica_of_.at(action.microbatch);
    const std::vector<Chunk>& chunks = chunks_[replica];
    const Place place{device, action.stage};
    const auto found = std::ranges::lower_bound(chunks, place, {}, &Chunk::place);
    if (found == chunks.end() || found->place != place) {
        throw std::out_of_range(
            "action must be of a stage on the device, got one of another stage");
    }
    return static_cast<int>(replica) * num_chunks_ + found->number;
}

}  // namespace pykern
