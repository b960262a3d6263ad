"""Executes kernels of all contenders, and keeps the figures that docs/kernel-evidence.md shows.

`pip install --no-deps --target build/liger liger-kernel==0.8.5`, then
`python -m tests.kernels.beside.save`, which takes some minutes, and
`python docs/make_kernel_evidence.py`. Nothing else needs Liger, and pykern does not depend on it.
"""

from __future__ import annotations

import json
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from tests.kernels.ptx.save import ROOT, lines

RESULTS = Path(__file__).with_name("results.jsonl")
LIGER = ROOT / "build/liger"
Line = dict[str, Any]


def executed(*options: str, liger: bool = True) -> list[Line]:
    """The lines of the program of this folder."""
    theirs = ("--liger", str(LIGER)) if liger else ()
    return lines("tests.kernels.beside", *theirs, *options)


def main() -> None:
    from bench.report import environment  # noqa: PLC0415

    where = environment("python -m tests.kernels.beside.save")
    found = {x.name: x.version for x in distributions(path=[str(LIGER)])}
    versions = {"triton": version("triton"), "liger": found["liger_kernel"]}
    kept = [{**where, **versions}, *executed()]
    RESULTS.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))


if __name__ == "__main__":
    main()
