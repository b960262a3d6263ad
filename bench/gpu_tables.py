"""The tables of docs/gpus.md, made of the newest kept session on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .kept import FOLDER

_CONTENDERS = {
    "pykern": "pykern",
    "eager": "plain torch",
    "compiled": "torch.compile",
    "liger": "Liger",
}
_MB = 1e6
_GB = 1e9


def kernels() -> str:
    """Milliseconds, share of a copy's bandwidth and peak memory of each fused operation."""
    figures = section("kernels")
    rows = [
        [name, *(_operation(of.get(key)) for key in _CONTENDERS)]
        for name, of in figures["operations"].items()
    ]
    return table(["forward and backward", *_CONTENDERS.values()], rows)


def _operation(found: Mapping[str, float] | str | None) -> str:
    if found is None:
        return ""
    if isinstance(found, str):
        return "not compared"
    peak = found["peak_bytes"] / _MB
    return f"**{found['ms']:.3f} ms**, {100 * found['share']:.0f} %, {peak:.0f} MB"


def levels() -> str:
    """A step at each level of recompute."""
    rows = [
        [
            f"`{level}`",
            f"{of['step_ms']:.0f}",
            f"{of['predicted_ms']:.0f}",
            f"{of['activation_bytes'] / _GB:.1f}",
        ]
        for level, of in section("levels").items()
    ]
    return table(["level", "step, ms", "predicted, ms", "peak of activations, GB"], rows)


def makespans() -> str:
    """Steps of stages that spin, beside the simulator: traced where a trace is possible."""
    rows = []
    for plan, of in section("makespan")["by_plan"].items():
        streams = of["streams"]
        traced = (streams[name]["traced_ms"] for name in ("eager", "graph"))
        times = (f"{ms:.1f}" for ms in (of["simulated_ms"], *traced, streams["step"]["step_ms"]))
        bubbles = of["simulated_bubble_ratio"], streams["graph"]["bubble_ratio"]
        rows.append([plan, *times, " and ".join(f"{bubble:.3f}" for bubble in bubbles)])
    headings = "schedule", "simulated, ms", "called", "a graph per action", "one graph"
    return table([*headings, "bubble ratio simulated, and by graphs"], rows)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def section(name: str) -> Any:
    """The figures of a section of the session."""
    newest = max(FOLDER.glob("gpu-session_*.json"), key=lambda file: file.stem[-10:])
    return json.loads(newest.read_text())["sections"][name]["figures"]


TABLES = {"kernels": kernels, "levels": levels, "makespans": makespans}
