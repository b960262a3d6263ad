"""Faults of steps that run on the calling thread."""

from .mutant import mutants

OF_SHORT_STEPS = mutants(
    "csrc/exec/short_step.cpp",
    ("test_short_step.cpp",),
    ("program.num_devices() > 1 || ", ""),
    ("program.is_endless() || ", ""),
    ("left -= std::min(left, ", "left -= std::min<std::int64_t>(0, "),
    ("    return left > 0;\n", "    return true;\n"),
    ("    if (workers.closed()) return;\n", ""),
    ("ok = !workers.closed() && ", "ok = "),
    ("ok && position < job", "position < job"),
    ("    client.leave(0);\n", ""),
    ("    job.trace.end();\n", ""),
)
