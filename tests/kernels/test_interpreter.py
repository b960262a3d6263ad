"""Kernels are interpreted in the tests' processes, on tensors of the CPU."""

import os
import subprocess
import sys

from bench.shared_library import ROOT


def test_a_machine_with_a_gpu_interprets_kernels_all_the_same(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", "import tests.conftest, os; print(os.environ['TRITON_INTERPRET'])"],
        cwd=ROOT,
        env=without | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "1\n"
