#include "driver_model/memory.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

namespace pykern::fake {
namespace {

std::string range_text(cuda::CUdeviceptr address, std::size_t bytes) {
    std::ostringstream text;
    text << "[0x" << std::hex << address << ", 0x" << address + bytes << ")";
    return text.str();
}

}  // namespace

std::string text_of(const Site& site) {
    return std::string(site.function) + ", work " + std::to_string(site.point.number) +
           " of stream " + std::to_string(site.point.stream) + " on device " +
           std::to_string(site.device);
}

void Memory::allocate(cuda::CUdeviceptr address, std::size_t bytes,
                      std::shared_ptr<const Stream> owner) {
    for (auto old = overlapping(address, bytes); old != allocations_.end();
         old = overlapping(address, bytes)) {
        if (!old->second.freed) {
            violations_.add(range_text(address, bytes) + " overlaps " +
                            range_text(old->first, old->second.bytes) + ", which is not freed");
        }
        allocations_.erase(old);
    }
    allocations_[address] = {bytes, std::move(owner), false, false, false};
}

bool Memory::is_allocated(cuda::CUdeviceptr address) const {
    const auto found = allocations_.find(address);
    return found != allocations_.end() && !found->second.freed;
}

bool Memory::is_freed(cuda::CUdeviceptr address) const {
    const auto found = allocations_.find(address);
    return found != allocations_.end() && found->second.freed;
}

std::size_t Memory::bytes_at(cuda::CUdeviceptr address) const {
    return allocations_.at(address).bytes;
}

std::size_t Memory::owner_of(cuda::CUdeviceptr address) const {
    return allocations_.at(address).owner->index;
}

void Memory::free(cuda::CUdeviceptr address, const Clock& host) {
    Allocation& allocation = allocations_.at(address);
    Clock now = allocation.owner->clock;
    now.join(host);
    const auto tell = [&](const Site& site) {
        violations_.add(range_text(address, allocation.bytes) + " freed while in use: stream " +
                        std::to_string(allocation.owner->index) +
                        ", which owns it, is not ordered after " + text_of(site));
    };
    const cuda::CUdeviceptr end = address + allocation.bytes;
    const auto first = cover(address, end);
    const auto last = pieces_.lower_bound(end);
    bool told = false;
    for (auto piece = first; piece != last && !told; ++piece) {
        std::vector<Site> sites = piece->second.reads;
        if (piece->second.write) sites.push_back(*piece->second.write);
        const auto open =
            std::ranges::find_if(sites, [&](const Site& site) { return !now.covers(site.point); });
        told = open != sites.end();
        if (told) tell(*open);
    }
    pieces_.erase(first, last);
    allocation.freed = true;
}

void Memory::forget(cuda::CUdeviceptr address) {
    const cuda::CUdeviceptr end = address + bytes_at(address);
    const auto first = cover(address, end);
    pieces_.erase(first, pieces_.lower_bound(end));
    allocations_.erase(address);
}

void Memory::touch(const Site& site, const Clock& clock, const FakeAccess& access) {
    if (access.bytes == 0) return;
    check_life(site, access);
    bool told = false;
    const auto check = [&](const Site& former, const char* verb) {
        if (told || clock.covers(former.point)) return;
        told = true;
        violations_.add("race on " + range_text(access.address, access.bytes) + ": " +
                        text_of(site) + (access.writes != 0 ? " writes" : " reads") + " what " +
                        text_of(former) + " " + verb + ", and nothing orders the two");
    };
    const cuda::CUdeviceptr end = access.address + access.bytes;
    for (auto piece = cover(access.address, end); piece != pieces_.end() && piece->first < end;
         ++piece) {
        auto& [unused, write, reads] = piece->second;
        if (write) check(*write, "writes");
        if (access.writes != 0) {
            for (const Site& read : reads) check(read, "reads");
            reads.clear();
            write = site;
        } else {
            std::erase_if(reads, [&](const Site& read) { return clock.covers(read.point); });
            reads.push_back(site);
        }
    }
}

bool Memory::is_pageable(cuda::CUdeviceptr address) const {
    const auto found = overlapping(address, 1);
    return found != allocations_.end() && !found->second.freed && found->second.pageable;
}

std::optional<int> Memory::device_of(cuda::CUdeviceptr address) const {
    const auto found = overlapping(address, 1);
    if (found == allocations_.end() || found->second.freed || found->second.on_host) {
        return std::nullopt;
    }
    return found->second.owner->device;
}

void Memory::check_life(const Site& site, const FakeAccess& access) {
    const auto tell = [&](const std::string& what) {
        violations_.add(text_of(site) + " touches " + range_text(access.address, access.bytes) +
                        ", which " + what);
    };
    const auto found = overlapping(access.address, access.bytes);
    if (found == allocations_.end()) {
        if (!undeclared_allowed_) tell("was never allocated");
        return;
    }
    const auto& [start, allocation] = *found;
    if (allocation.freed) {
        tell("was freed");
    } else if (access.address < start || access.address + access.bytes > start + allocation.bytes) {
        tell("reaches out of the allocation " + range_text(start, allocation.bytes));
    }
}

Memory::Allocations::const_iterator Memory::overlapping(cuda::CUdeviceptr address,
                                                        std::size_t bytes) const {
    // The last that starts before the end: allocations do not overlap each other.
    const auto next = allocations_.lower_bound(address + bytes);
    if (next == allocations_.begin()) return allocations_.end();
    const auto last = std::prev(next);
    return last->first + last->second.bytes > address ? last : allocations_.end();
}

Memory::Pieces::iterator Memory::cut_at(cuda::CUdeviceptr address) {
    const auto next = pieces_.lower_bound(address);
    if (next == pieces_.begin()) return next;
    const auto before = std::prev(next);
    if (before->second.end <= address) return next;
    const auto cut = pieces_.emplace_hint(next, address, before->second);
    before->second.end = address;
    return cut;
}

Memory::Pieces::iterator Memory::cover(cuda::CUdeviceptr address, cuda::CUdeviceptr end) {
    cut_at(end);
    auto piece = cut_at(address);
    for (cuda::CUdeviceptr covered = address; covered < end; ++piece) {
        const cuda::CUdeviceptr next = piece == pieces_.end() ? end : std::min(piece->first, end);
        if (covered < next) piece = pieces_.emplace_hint(piece, covered, Piece{next, {}, {}});
        covered = piece->second.end;
    }
    return pieces_.lower_bound(address);
}

}  // namespace pykern::fake
