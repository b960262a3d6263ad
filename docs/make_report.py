"""Draws docs/report.svg: what `pykern profile` prints on a terminal.

Run from anywhere: python docs/make_report.py. Its figures are measured on this machine, so no test
compares the picture with what this makes.
"""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

import pykern
from pykern.cli.workloads import workload_of

PICTURE = Path(__file__).parent / "report.svg"
WIDTH = 128
STAGES = 2


def made() -> str:
    """The picture of a report on a small GPT, whose second stage has too many layers."""
    workload = workload_of(None)(STAGES)
    args = workload.inputs if isinstance(workload.inputs, tuple) else (workload.inputs,)
    with pykern.Pipeline(
        workload.model,
        devices=f"cpu:{STAGES}",
        microbatches=4,
        balance=[2, 4],
        loss_fn=workload.loss_fn,
    ) as pipe:
        report = pipe.profile(*args, target=workload.target, steps=5)
    console = Console(file=StringIO(), width=WIDTH, record=True, highlight=False)
    console.print(report)
    picture = console.export_svg(title="pykern profile")
    # Fonts of the reader's own, and nothing from the network.
    return re.sub(r"@font-face \{[^}]*\}\s*", "", picture)


if __name__ == "__main__":
    PICTURE.write_text(made(), encoding="utf-8")
