"""Faults of steps that threads issue."""

from .mutant import mutants

THREADS = ("test_issuing.cpp",)
ENGINE = ("-n0", "tests/device_oracle/threads_on_gpus.py")

OF_ISSUING = (
    *mutants(
        "csrc/exec/issuing.cpp",
        THREADS,
        ("issued.edges.push_back({.from = position(input), .to = position(task)});", ""),
        (
            "for (std::size_t i = 1; i < row.size(); ++i) {",
            "for (std::size_t i = 1; i < row.size() && false; ++i) {",
        ),
        ("if (stream <= order.num_devices()) {", "if (stream <= order.num_devices() + 1) {"),
    ),
    *mutants(
        "csrc/exec/workers.cpp",
        THREADS,
        ("    if (program.is_issuing()) return !program.is_in_row(position);\n", ""),
        (
            "if (program.is_issuing()) return !program.is_in_row(position);",
            "if (program.is_issuing()) return false;",
        ),
    ),
    *mutants(
        "csrc/exec/step_marks.cpp",
        ("test_step_marks.cpp", "test_stream_watch.cpp"),
        ("is_recorded_[task].load(std::memory_order_acquire)", "true"),
    ),
    *mutants(
        "pykern/runtime/gpu/issuing.py",
        ENGINE,
        ("        set_multithreading(False)\n", ""),
        (
            "        gpus.enter_streams()\n",
            "",
            (
                "Each action sets its own lane's stream, and torch orders a copy between two GPUs "
                "with the current streams of both, whichever these are."
            ),
        ),
        ("        undo = state()\n", "        undo = int\n"),
        ("            self._threads.close()\n", "            pass\n"),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        ENGINE,
        ("        self._issuer.close()\n", ""),
    ),
)
