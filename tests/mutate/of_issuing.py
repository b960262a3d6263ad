"""Faults of steps that threads issue."""

from .mutant import Mutant

THREADS = ("test_issuing.cpp",)
ENGINE = ("-n0", "tests/device_oracle/threads_on_gpus.py")

OF_ISSUING = (
    Mutant(
        "csrc/exec/issuing.cpp",
        "issued.edges.push_back({.from = position(input), .to = position(task)});",
        "",
        THREADS,
    ),
    Mutant(
        "csrc/exec/issuing.cpp",
        "for (std::size_t i = 1; i < row.size(); ++i) {",
        "for (std::size_t i = 1; i < row.size() && false; ++i) {",
        THREADS,
    ),
    Mutant(
        "csrc/exec/issuing.cpp",
        "if (stream <= order.num_devices()) {",
        "if (stream <= order.num_devices() + 1) {",
        THREADS,
    ),
    Mutant(
        "csrc/exec/workers.cpp",
        "    if (program.is_issuing()) return !program.is_in_row(position);\n",
        "",
        THREADS,
    ),
    Mutant(
        "csrc/exec/workers.cpp",
        "if (program.is_issuing()) return !program.is_in_row(position);",
        "if (program.is_issuing()) return false;",
        THREADS,
    ),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "is_recorded_[task].load(std::memory_order_acquire)",
        "true",
        ("test_step_marks.cpp", "test_stream_watch.cpp"),
    ),
    Mutant("pykern/runtime/gpu/issuing.py", "        set_multithreading(False)\n", "", ENGINE),
    Mutant(
        "pykern/runtime/gpu/issuing.py",
        "        gpus.enter_streams()\n",
        "",
        ENGINE,
        harmless="Each action sets its own lane's stream, and torch orders a copy between two GPUs "
        "with the current streams of both, whichever these are.",
    ),
    Mutant(
        "pykern/runtime/gpu/issuing.py", "        undo = state()\n", "        undo = int\n", ENGINE
    ),
    Mutant(
        "pykern/runtime/gpu/issuing.py",
        "            self._threads.close()\n",
        "            pass\n",
        ENGINE,
    ),
    Mutant("pykern/runtime/gpu/streams.py", "        self._issuer.close()\n", "", ENGINE),
)
