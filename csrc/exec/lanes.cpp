#include "exec/lanes.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/device.hpp"
#include "exec/ranges.hpp"

namespace pykern {

Lanes::Lanes(std::vector<LaneName> names) : names_(std::move(names)) {
    if (names_.empty()) {
        throw std::invalid_argument("lanes must hold at least one, got an empty list");
    }
    std::map<int, int> parts_of;
    for (const LaneName& name : names_) {
        if (name.num_parts < 1 || name.part < 0 || name.part >= name.num_parts) {
            throw std::invalid_argument(
                "part must be below the number of parts of GPU " + std::to_string(name.gpu) + ", " +
                std::to_string(name.num_parts) + ", got " + std::to_string(name.part));
        }
        const auto [parts, is_new] = parts_of.try_emplace(name.gpu, name.num_parts);
        if (!is_new && parts->second != name.num_parts) {
            throw std::invalid_argument(
                "GPU " + std::to_string(name.gpu) + " must be split once, got " +
                std::to_string(parts->second) + " parts and " + std::to_string(name.num_parts) +
                ". Parts of two splits would overlap");
        }
    }
    for (const LaneName& name : names_) {
        add(name);
        const std::string lane = std::to_string(compute_.size() - 1);
        name_stream(compute_.back(), ("pykern dev" + lane + " compute").c_str());
    }
    ask_for_peers();
}

void Lanes::add(const LaneName& name) {
    const cuda::PrimaryContext& primary = primaries_.try_emplace(name.gpu, name.gpu).first->second;
    if (!rings_.contains(name.gpu)) {
        rings_.emplace(name.gpu, cuda::take_stream(name.gpu, cuda::StreamUse::kRing));
    }
    if (name.num_parts == 1) {
        contexts_.push_back(primary.get());
        of_gpus_.push_back(cuda::take_stream(name.gpu, cuda::StreamUse::kCompute));
        compute_.push_back(of_gpus_.back().get());
        return;
    }
    const auto num_parts = static_cast<unsigned>(name.num_parts);
    const cuda::Partition& partition =
        partitions_.try_emplace(name.gpu, name.gpu, num_parts).first->second;
    const cuda::Group& group = partition.groups()[static_cast<std::size_t>(name.part)];
    contexts_.push_back(group.context());
    of_parts_.push_back(group.make_stream());
    compute_.push_back(of_parts_.back().get());
}

void Lanes::close() {
    compute_.clear();
    of_parts_.clear();
    of_gpus_.clear();
    rings_.clear();
}

void Lanes::ask_for_peers() {
    for (const auto& [from, primary] : primaries_) {
        for (const auto& [to, other] : primaries_) {
            if (from != to && cuda::can_access_peer(from, to)) peers_.emplace(from, to);
        }
    }
}

bool Lanes::reaches(int from, int to) const {
    return gpu_of(from) == gpu_of(to) || peers_.contains({gpu_of(from), gpu_of(to)});
}

void Lanes::copy_at_once(const std::vector<LaneCopy>& copies) const {
    const cuda::CurrentContext restore(primary(0));
    for (const LaneCopy& copy : copies) {
        cuda::driver::cuCtxSetCurrent(primary(copy.sender));
        cuda::driver::cuMemcpyAsync(copy.to, copy.from, copy.bytes, ring(gpu_of(copy.sender)));
    }
    for (const LaneCopy& copy : copies) {
        cuda::driver::cuStreamSynchronize(ring(gpu_of(copy.sender)));
    }
}

}  // namespace pykern
