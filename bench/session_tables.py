"""The tables of docs/gpu-session.md: what the sections ask, and what they have printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from .gpu import frame
from .gpu_tables import session, table


def asked(run: str) -> str:
    """The sections of a run, with their limits and the faults that they must notice."""
    rows = [
        [f"`{name}`", f"{limit_s} s", frame.purpose(name), frame.planted(name)]
        for name, limit_s in frame.RUNS[run].items()
    ]
    return table(["section", "at most", "what it asks", "fault"], rows)


def printed(run: str, claim: str) -> str:
    """The lines of a run's sections that have ended well, from the newest file of a claim."""
    sections = session(claim)["sections"]
    lines = [
        frame.summary(name, sections[name])
        for name in frame.RUNS[run]
        if sections.get(name, {}).get("outcome") == "ok"
    ]
    return "\n".join(["```text", *lines, "```"])


TABLES: Mapping[str, Callable[[], str]] = {
    block: make
    for run in frame.RUNS
    for block, make in {
        f"{run}, asked": partial(asked, run),
        f"{run}, on a GPU": partial(printed, run, "gpu-session"),
        f"{run}, in a dry run": partial(printed, run, "dry-run"),
    }.items()
}
