"""Faults in slots and rings, and in what the driver is asked for."""

from .mutant import Mutant
from .of_exec import ORDER

LOWER = ("test_lower.cpp", *ORDER)
OBJECTS = ("test_driver.cpp", "test_partition.cpp")

OF_PLAN = (
    Mutant(
        "csrc/exec/lanes.cpp",
        "cuda::can_access_peer(from, to)",
        "cuda::can_access_peer(to, from)",
        ORDER,
    ),
    Mutant("csrc/exec/lanes.cpp", "gpu_of(from) == gpu_of(to) || ", "", ORDER),
    Mutant(
        "csrc/exec/lanes.cpp",
        "contexts_.push_back(group.context());",
        "contexts_.push_back(primary.get());",
        ORDER,
    ),
    Mutant(
        "csrc/exec/lanes.cpp",
        "of_parts_.push_back(group.make_stream());",
        "of_parts_.push_back(cuda::make_stream(primary.get()));",
        ORDER,
    ),
    Mutant(
        "csrc/plan/cell_slots.cpp", "uses_.front().to < from", "uses_.front().to <= from", LOWER
    ),
    Mutant(
        "csrc/plan/cell_slots.cpp",
        "std::max(num_slots, slot + 1)",
        "std::max(num_slots, slot)",
        LOWER,
    ),
    Mutant(
        "csrc/plan/cell_slots.cpp",
        "{Kind::W, Kind::B, Kind::F}",
        "{Kind::I, Kind::B, Kind::F}",
        LOWER,
    ),
    Mutant(
        "csrc/plan/ring_uses.cpp",
        "uses[i - 1].from = std::min(uses[i - 1].from, uses[i].from);",
        "",
        LOWER,
    ),
    Mutant(
        "csrc/plan/ring_uses.cpp", "slot == 0 ? 0 : slot_start(starts, slot - 1)", "slot", LOWER
    ),
    Mutant("csrc/plan/ring_uses.cpp", "++reader.stage;", "", LOWER),
    Mutant(
        "csrc/plan/lower.cpp",
        "if (taken.freed_at != FreeSlots::kNeverUsed) copy.freed_by = receiver[taken.freed_at];",
        "",
        LOWER,
    ),
    Mutant(
        "csrc/plan/lower.cpp",
        "static_cast<std::size_t>(replica) * static_cast<std::size_t>(plan.num_stages()) +\n",
        "0 * static_cast<std::size_t>(replica) +\n",
        LOWER,
    ),
    Mutant(
        "csrc/plan/check_lowered.cpp",
        "waited_to < free_at_[slot]",
        "waited_to + 1 < free_at_[slot]",
        LOWER,
    ),
    Mutant(
        "csrc/plan/check_lowered.cpp", "waited_to > use.from", "waited_to > use.from + 1", LOWER
    ),
    Mutant(
        "csrc/plan/check_lowered.cpp",
        "free_at_[slot] = use.to + 1;",
        "free_at_[slot] = use.to;",
        LOWER,
    ),
    Mutant("csrc/cuda/objects.cpp", "{ api().cuCtxSetCurrent(before_); }", "= default;", OBJECTS),
    Mutant("csrc/cuda/objects.cpp", "kStreamNonBlocking, priority", "0, priority", OBJECTS),
    Mutant(
        "csrc/cuda/objects.cpp",
        "    const CurrentContext current(context);\n    CUevent",
        "    CUevent",
        OBJECTS,
    ),
    Mutant("csrc/cuda/objects.cpp", "if (origin.is_here()) api()", "api()", OBJECTS),
    Mutant(
        "csrc/cuda/partition.cpp", "green_.get(), kStreamNonBlocking", "green_.get(), 0", OBJECTS
    ),
    Mutant(
        "csrc/cuda/partition.cpp",
        "whole.sm.smCount / num_groups / step * step",
        "whole.sm.smCount / num_groups",
        OBJECTS,
    ),
    Mutant(
        "csrc/cuda/device.cpp", "if (result != kPeerAccessAlreadyEnabled) check(", "check(", OBJECTS
    ),
)
