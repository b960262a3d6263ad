"""Faults in slots and rings, and in what the driver is asked for."""

from .mutant import mutants
from .of_exec import ORDER

LOWER = ("test_lower.cpp", *ORDER)
OBJECTS = ("test_driver.cpp", "test_partition.cpp")

OF_PLAN = (
    *mutants(
        "csrc/exec/lanes.cpp",
        ORDER,
        ("cuda::can_access_peer(from, to)", "cuda::can_access_peer(to, from)"),
        ("gpu_of(from) == gpu_of(to) || ", ""),
        ("contexts_.push_back(group.context());", "contexts_.push_back(primary.get());"),
        (
            "of_parts_.push_back(group.make_stream());",
            "of_parts_.push_back(cuda::make_stream(primary.get()));",
        ),
    ),
    *mutants(
        "csrc/plan/cell_slots.cpp",
        LOWER,
        ("uses_.front().to < from", "uses_.front().to <= from"),
        ("std::max(num_slots, slot + 1)", "std::max(num_slots, slot)"),
        ("{Kind::W, Kind::B, Kind::F}", "{Kind::I, Kind::B, Kind::F}"),
    ),
    *mutants(
        "csrc/plan/ring_uses.cpp",
        LOWER,
        ("uses[i - 1].from = std::min(uses[i - 1].from, uses[i].from);", ""),
        ("slot == 0 ? 0 : slot_start(starts, slot - 1)", "slot"),
        ("++reader.stage;", ""),
    ),
    *mutants(
        "csrc/plan/lower.cpp",
        LOWER,
        (
            "if (taken.freed_at != FreeSlots::kNeverUsed) "
            "copy.freed_by = receiver[taken.freed_at];",
            "",
        ),
        (
            "static_cast<std::size_t>(replica) * static_cast<std::size_t>(plan.num_stages()) +\n",
            "0 * static_cast<std::size_t>(replica) +\n",
        ),
    ),
    *mutants(
        "csrc/plan/check_lowered.cpp",
        LOWER,
        ("waited_to < free_at_[slot]", "waited_to + 1 < free_at_[slot]"),
        ("waited_to > use.from", "waited_to > use.from + 1"),
        ("free_at_[slot] = use.to + 1;", "free_at_[slot] = use.to;"),
    ),
    *mutants(
        "csrc/cuda/objects.cpp",
        OBJECTS,
        ("{ api().cuCtxSetCurrent(before_); }", "= default;"),
        ("kStreamNonBlocking, priority", "0, priority"),
        ("    const CurrentContext current(context);\n    CUevent", "    CUevent"),
        ("if (origin.is_here()) api()", "api()"),
    ),
    *mutants(
        "csrc/cuda/partition.cpp",
        OBJECTS,
        ("green_.get(), kStreamNonBlocking", "green_.get(), 0"),
        ("whole.sm.smCount / num_groups / step * step", "whole.sm.smCount / num_groups"),
    ),
)
