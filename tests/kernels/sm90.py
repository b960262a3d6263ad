"""Compiles Triton kernels without a GPU, for sm_90 or others, on a driver that only compiles.

As a program, `python -m tests.kernels.sm90 FILE 90`, it runs a Python script that calls launchers
on CPU tensors, in a process where Triton is not interpreted, and prints JSON, a line for each
kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support import programs


@dataclass(frozen=True)
class Compiled:
    """One kernel as it would be loaded.

    Attributes:
        name: of its function.
        registers: of a thread.
        num_threads: of a program.
        opcodes: SASS instructions with their modifiers ("LDG.E.128"), and how often each occurs.
    """

    name: str
    registers: int
    num_threads: int
    opcodes: dict[str, int]

    @property
    def num_instructions(self) -> int:
        """Those that do something."""
        return sum(n for opcode, n in self.opcodes.items() if opcode not in ("NOP", "BRA", "EXIT"))

    @property
    def spills(self) -> int:
        """Accesses to what did not fit into registers."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(("LDL", "STL")))

    def accesses(self, letters: str) -> dict[int, int]:
        """Widths in bits of the loads (LDG) or stores (STG) of global memory, and how often."""
        widths: Counter[int] = Counter()
        for opcode, number in self.opcodes.items():
            if opcode.startswith(letters):
                found = re.search(r"\.(256|128|64|U16|U8|S8|S16)(\.|$)", opcode)
                widths[int(re.sub(r"\D", "", found[1])) if found else 32] += number
        return dict(widths)


def compiled_for_sm90(script: str) -> list[Compiled]:
    """The kernels that a script launches, in the order of their compilation, each once."""
    return compiled_for(script, 90)


@cache
def compiled_for(script: str, capability: int) -> list[Compiled]:
    """Likewise, for GPUs of a compute capability: 80 for 8.0."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        done = programs.run(
            programs.MODULE.format(name="tests.kernels.sm90"),
            str(path),
            str(capability),
            timeout=600,
            environment=environment | {"TRITON_CACHE_DIR": folder},
        )
    assert done.returncode == 0, done.stderr
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def stack_bytes(cubin: bytes) -> int:
    """The bytes that a thread keeps in memory of its own: 0 where all fits into registers."""
    with _written(cubin) as path:
        found = re.search(r"STACK:(\d+)", _tool("cuobjdump", "--dump-resource-usage", path))
    assert found
    return int(found[1])


@contextlib.contextmanager
def _written(cubin: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        yield file.name


def machine_code(name: str, cubin: bytes, num_threads: int) -> Compiled:
    """Registers and opcodes of a compiled binary of one kernel."""
    with _written(cubin) as path:
        usage = _tool("cuobjdump", "--dump-resource-usage", path)
        sass = _tool("nvdisasm", "--print-code", path)
    opcodes = Counter(
        re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.M)
    )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers
    assert opcodes
    return Compiled(name, int(registers[1]), num_threads, opcodes)


def _main(script: str, capability: int) -> None:
    # Asking a driver that does not exist would fail, so what asks is replaced before anything does.
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    assert os.environ.get("TRITON_INTERPRET") != "1"
    driver.set_active(_Driver(GPUTarget("cuda", capability, 32)))
    runpy.run_path(script, run_name="__main__")


class _Driver:
    """The interface that Triton asks of a driver; launches do nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.utils = SimpleNamespace(
            load_binary=self._load,
            get_device_properties=lambda _: {
                "max_shared_mem": 232448,
                "multiprocessor_count": 132,
                "warpSize": 32,
            },
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def launcher_cls(self, _: Any, metadata: Any) -> Any:
        self._num_threads = metadata.num_warps * 32
        return lambda *_: None

    def _load(self, name: str, cubin: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        print(json.dumps(machine_code(name, cubin, self._num_threads).__dict__))
        return 0, 0, 0, 0, 1024


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia  # noqa: PLC0415

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _main(sys.argv[1], int(sys.argv[2]))
