"""The machine instructions of an action beside those of hand-written loops, counted by Valgrind.

    python -m bench.instructions --out instructions.jsonl

The contenders are those of `bench_dispatch` and `bench_features`. A count needs no quiet machine:
other programs change nothing in it. An instruction that waits for memory counts as any other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from . import bench_dispatch as dispatch
from . import bench_features as features
from .contenders import loop_order
from .harness import Contender
from .report import environment
from .shared_library import ROOT, compile_library

MARKS = Path(__file__).with_suffix(".cpp")
STAGES = {f"S = {count}": count for count in (1, 2, 4)}
CASES = [*STAGES, *features.CASES]
WARMUPS, STEPS = 3, 3
# Names are written with the number of actions, since Valgrind keeps nothing else.
_WRITTEN = re.compile(r"^desc: Trigger: Client Request: (.*)\|(\d+)$.*^totals: (\d+)$", re.M | re.S)


def contenders(case: str, num_microbatches: int) -> tuple[list[Contender], int]:
    """The contenders of a case, a loop first, and the actions of one of their steps."""
    torch.manual_seed(0)
    if case not in STAGES:
        make, through, num_stages, options = features.CASES[case]
        model, batch = make(), torch.randn(2, 4 * num_microbatches, features.WIDTH)
        plan = loop_order(num_stages, num_microbatches)
        loop = features.in_a_loop(model, batch, num_microbatches, through)
        found = [loop, features.in_pykern(model, batch, plan, options)]
        return found, num_microbatches * features.actions_of_a_microbatch(case)
    count = STAGES[case]
    chain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))
    batch = torch.randn(2, 4 * num_microbatches, 16)
    found = [
        dispatch.hand_loop(chain, batch, num_microbatches),
        dispatch.hand_loop(chain, batch, num_microbatches, "engine loop"),
        dispatch.in_pykern(chain, batch, num_microbatches, num_workers=1, in_loop_order=True),
    ]
    return found, 2 * num_microbatches * count


def run(case: str, num_microbatches: int, library: str) -> None:
    """Steps of each contender, under Valgrind."""
    marks = ctypes.CDLL(library)
    torch.set_num_threads(1)
    found, num_actions = contenders(case, num_microbatches)
    for contender in found:
        contender.prepare()
        for _ in range(WARMUPS):
            contender.step()
        marks.recorder_begin()
        for _ in range(STEPS):
            contender.step()
        marks.recorder_end(f"{contender.name}|{num_actions * STEPS}".encode())


def read(written: str) -> tuple[str, float]:
    """The contender, and its instructions per action, in a file of Valgrind's."""
    found = _WRITTEN.search(written)
    assert found is not None, written[:1000]
    return found[1], int(found[3]) / int(found[2])


def counted(case: str, num_microbatches: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Instructions of an action of each contender.

    Raises:
        ValueError: Valgrind is not installed.
        CalledProcessError: a step failed.
    """
    if shutil.which("valgrind") is None:
        raise ValueError("valgrind must be on the PATH, got no such command. Install valgrind")
    compile_library([MARKS], library := folder / "marks.so")
    out = folder / "count"
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    command += [sys.executable, "-m", "bench.instructions", "--run", case, str(num_microbatches)]
    # Sets of names have the same order in each run.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    subprocess.run([*command, library], cwd=ROOT, env=environment, check=True, capture_output=True)
    baseline = None
    for written in sorted(folder.glob("count.*"), key=lambda path: int(path.suffix[1:])):
        name, of_action = read(written.read_text(encoding="utf-8"))
        baseline = baseline or of_action
        yield {
            "case": case,
            "contender": name,
            "instructions": round(of_action),
            "beyond": round(of_action - baseline),
            "ratio": round(of_action / baseline, 4),
        }


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="results are written to this file")
    parser.add_argument("--only", default="", help="cases whose names begin like this")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        case, num_microbatches, library = options.run
        run(case, int(num_microbatches), library)
        return
    header = {**environment("python -m bench.instructions --out instructions.jsonl")}
    header["clock"] = "instructions, counted by Valgrind"
    found = list(_all([case for case in CASES if case.startswith(options.only)]))
    if options.out:
        lines = [f"{json.dumps(line)}\n" for line in (header, *found)]
        options.out.write_text("".join(lines), encoding="utf-8")


def _all(cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    for case in cases:
        with TemporaryDirectory() as folder:
            for one in counted(case, 64, Path(folder)):
                print(json.dumps(one), flush=True)
                yield one


if __name__ == "__main__":
    main()
