"""The section of the GPU session judges logs, here those of the fake driver."""

from pathlib import Path

import pytest

from bench.gpu import driver_log
from tests.driver_log.replay import waits, without, without_wait_of_copy

EAGER = driver_log.KEPT / "eager.log"


def test_a_log_has_its_figures() -> None:
    figures = driver_log.judged(EAGER, EAGER)
    assert figures["bytes"] == EAGER.stat().st_size
    assert figures["calls_of_step"]["cuMemcpyAsync"] == 2 * 3 * 4
    assert figures["calls_of_step_as_on_the_fake"]
    assert figures["replayed"] > sum(figures["calls_of_step"].values())
    assert figures["differences"] == figures["violations"] == []


def test_a_step_that_lacks_a_call_is_told(tmp_path: Path) -> None:
    log = EAGER.read_text()
    file = tmp_path / "eager.log"
    file.write_text(without(log, waits(log)[-1]))
    assert not driver_log.judged(file, EAGER)["calls_of_step_as_on_the_fake"]
    file.write_text(without_wait_of_copy(log))
    figures = driver_log.judged(file, EAGER)
    assert not figures["calls_of_step_as_on_the_fake"]
    assert figures["violations"]


def test_a_log_that_is_too_large_or_is_not_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.log"
    other.write_text("1 nothing\n")
    with pytest.raises(RuntimeError, match=r"(?s)cannot be replayed: .*got '1 nothing'"):
        driver_log.replayed(other)
    monkeypatch.setattr(driver_log, "MOST_BYTES", 100)
    with pytest.raises(RuntimeError, match="and should have at most 100"):
        driver_log.judged(EAGER, EAGER)
