"""Kept logs of driver calls, replayed against the fake driver; what a log lacks is seen."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver_log.replay import replay, waits, without, without_wait_of_copy

LOGS = Path(__file__).parent / "logs"
FAKE = LOGS / "fake"


def _named(file: Path) -> str:
    return f"{file.parent.name}, {file.stem}"


@pytest.mark.parametrize("file", sorted(LOGS.glob("*/*.log")), ids=_named)
def test_a_kept_log_replays(file: Path) -> None:
    log = file.read_text()
    found = replay(log)
    assert found.num_calls == len(re.findall(r"^\d+ cu", log, re.MULTILINE)) > 1000
    assert found.differences == []
    assert found.violations == []


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_a_copy_that_does_not_wait_is_seen(name: str) -> None:
    log = (FAKE / f"{name}.log").read_text()
    found = replay(without_wait_of_copy(log))
    assert found.differences == []
    assert "cuMemcpyAsync" in found.violations[0]
    assert "nothing orders" in found.violations[0]


@pytest.mark.parametrize(("name", "least"), [("eager", 50), ("graph", 50), ("step", 2)])
def test_waits_that_are_left_out_are_seen(name: str, least: int) -> None:
    """The others are those whose order another wait gives as well; a number that falls is found."""
    log = (FAKE / f"{name}.log").read_text()
    last_step = log.partition("\n1 step 3\n")[0].count("\n")
    of_step = [wait for wait in waits(log) if wait > last_step]
    assert sum(bool(replay(without(log, wait)).violations) for wait in of_step) >= least


def test_edges_that_are_left_out_of_a_graph_are_seen() -> None:
    log = (FAKE / "step.log").read_text()
    assert sum(bool(replay(weaker).violations) for weaker in without_an_edge(log)) >= 79


def without_an_edge(log: str) -> Iterator[str]:
    """Logs in which one node of the step's graph does not come after one of those before it."""
    for nodes in re.finditer(r"\((node[^)]*)\)", log):
        names = nodes[1].split(",")
        for name in names:
            rest = ",".join(other for other in names if other != name)
            yield f"{log[: nodes.start()]}({rest}){log[nodes.end() :]}"


def test_a_call_that_ends_otherwise_is_told() -> None:
    log = (FAKE / "step.log").read_text()
    recorded = "1 cuEventRecord event1 stream0 = 0"
    failed = log.replace(recorded, "1 cuEventRecord event1 stream0 = 400", 1)
    assert replay(failed).differences == ["1 cuEventRecord event1 stream0 = 400, and now 0"]


@pytest.mark.parametrize(
    "line",
    ["2 cuInit 0 = 0", "1 cuInit", "1 cuEventRecord event7 stream0 = 0", "1 cuInit resource = 0"],
)
def test_a_line_that_cannot_be_replayed_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="log must have "):
        replay(line)
