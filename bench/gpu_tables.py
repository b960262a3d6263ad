"""The tables of docs/gpus.md, made of the newest kept session on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .gpu_sections import SEEN
from .kept import FOLDER

_CONTENDERS = {
    "pykern": "pykern",
    "eager": "plain torch",
    "compiled": "torch.compile",
    "liger": "Liger",
}
_MB = 1e6
_GB = 1e9


def machine() -> str:
    """The machine and the versions of the session, with a link to its file."""
    of = session()["environment"]
    gpu, driver, *_ = of["gpu"].split(", ")
    versions = of["versions"]
    return (
        f"{gpu}, driver {driver}, {of['cores']} cores, Python {of['python']}, "
        f"torch {versions['torch']}, Triton {versions['triton']}; {of['date'][:10]}, "
        f"`python bench/gpu_session.py SECTION --out DIR`; "
        f"[all figures](../bench/results/{_file().name})."
    )


def sections() -> str:
    """A row for each section that ended well, with its figures."""
    found = session()["sections"]
    rows = []
    for name, seen in SEEN.items():
        of = found[name]
        if of["outcome"] != "ok":
            raise ValueError(f"section {name} must have ended well, got {of['outcome']}")
        rows.append([f"`{name}`", of["commit"], of["ran"], seen(of["figures"])])
    return table(["section", "commit", "ran", "what was seen"], rows)


def kernels() -> str:
    """Milliseconds, share of a copy's bandwidth and peak memory of each fused operation."""
    figures = section("kernels")
    rows = [
        [name, *(_operation(of.get(key)) for key in _CONTENDERS)]
        for name, of in figures["operations"].items()
    ]
    times = table(["forward and backward", *_CONTENDERS.values()], rows)
    return f"A copy's bandwidth is {figures['copy_gbs']:,.0f} GB/s.\n\n{times}"


def _operation(found: Mapping[str, float] | str | None) -> str:
    if found is None:
        return ""
    if isinstance(found, str):
        return "not compared"
    peak = found["peak_bytes"] / _MB
    return f"**{found['ms']:.3f} ms**, {100 * found['share']:.0f} %, {peak:.0f} MB"


def levels() -> str:
    """A step at each level of recompute, beside that without any."""
    figures = section("levels")
    none = figures["none"]
    rows = [
        [
            f"`{level}`",
            f"{of['step_ms']:.0f}",
            f"{of['step_ms'] / none['step_ms']:.2f}",
            f"{of['predicted_ms']:.0f}",
            f"{of['activation_bytes'] / _GB:.1f}",
            f"{of['activation_bytes'] / none['activation_bytes']:.2f}",
        ]
        for level, of in figures.items()
    ]
    peak = "peak of activations, GB"
    return table(["level", "step, ms", "x `none`", "predicted, ms", peak, "x `none`"], rows)


def makespans() -> str:
    """Steps of stages that spin, beside the simulator: traced where a trace is possible."""
    rows = []
    for plan, of in section("makespan")["by_plan"].items():
        streams = of["streams"]
        traced = (streams[name]["traced_ms"] for name in ("eager", "graph"))
        simulated = of["simulated_ms"]
        times = (
            f"{ms:.1f} ({100 * (ms / simulated - 1):+.1f} %)"
            for ms in (*traced, streams["step"]["step_ms"])
        )
        bubbles = of["simulated_bubble_ratio"], streams["graph"]["bubble_ratio"]
        both = " and ".join(f"{bubble:.3f}" for bubble in bubbles)
        rows.append([plan, f"{simulated:.1f}", *times, both])
    headings = "schedule", "simulated, ms", "called", "a graph per action", "one graph"
    return table([*headings, "bubble ratio simulated, and by graphs"], rows)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def section(name: str) -> Any:
    """The figures of a section of the session."""
    return session()["sections"][name]["figures"]


def session(claim: str = "gpu-session") -> Any:
    """The newest kept session of a claim."""
    return json.loads(_file(claim).read_text(encoding="utf-8"))


def _file(claim: str = "gpu-session") -> Path:
    return max(FOLDER.glob(f"{claim}_*.json"), key=lambda file: file.stem[-10:])


TABLES = {
    "machine": machine,
    "sections": sections,
    "kernels": kernels,
    "levels": levels,
    "makespans": makespans,
}
