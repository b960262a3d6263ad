"""A run on workers measures every section, within its time, and loses nothing to an interrupt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.benchmark import Figure, compare, load, run, sections
from pykern.benchmark.torch_processes import torch_steps
from pykern.benchmark.torch_rank import schedules_of_torch
from pykern.cli import app


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models and few steps."""
    monkeypatch.setattr(sections, "_STEPS", 2)
    monkeypatch.setattr(sections, "_WARMUPS", 1)
    monkeypatch.setattr(sections, "_SIZES", {"cpu": (16, 2, 8, 1)})
    monkeypatch.setattr(sections, "_COPIED_BYTES", 2**12)
    monkeypatch.setattr(sections, "_PEERS", ())
    # Processes take seconds to start: one test runs them.
    monkeypatch.setattr(sections, "torch_steps", lambda *_: iter(()))


@pytest.mark.usefixtures("few")
@pytest.mark.timeout(180)
def test_every_section_runs_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "torch_steps", torch_steps)
    path = tmp_path / "box.json"
    done = CliRunner().invoke(app, ["bench", "box", "--out", str(path)])
    assert done.exit_code == 0, done.output
    found = load(path)
    assert found.left_out == {}
    names = [figure.name for figure in found.figures]
    assert len(names) == len(set(names)) == 9 + len(schedules_of_torch())
    assert sum(figure.predicted is not None for figure in found.figures) == 5
    assert all(name in done.stdout for name in names)
    assert found.machine["devices"] == "cpu:2"


def test_no_figure_tells_a_folder_or_a_name(few: None, tmp_path: Path) -> None:
    text = run("cpu:2", 60).text()
    for private in (str(Path.home()), str(tmp_path), "/", "hostname"):
        assert private not in text.replace("ms/", "")


@pytest.mark.usefixtures("few")
def test_boxes_share_figures_of_as_many_devices() -> None:
    one, two = run("cpu:1", 60), run("cpu:2", 60)
    assert one.left_out == two.left_out == {}
    assert len(one.figures) == len(two.figures)
    assert [row.name for row in compare(one, two)] == ["host copy of 256 MiB"]


@pytest.mark.usefixtures("few")
def test_peers_are_timed_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A package that is there, with a class that takes the same arguments; and one that is not.
    ours, absent = ("json", "pykern.interop.torchgpipe", "GPipe"), ("not_here", "not_here", "Pipe")
    monkeypatch.setattr(sections, "_PEERS", (absent, ours))
    (figure,) = sections.peers("cpu:2", 2)
    assert figure.name == "a GPT's step, json, 2 x cpu"
    assert (figure.unit, len(figure.samples)) == ("ms", 2)


def test_a_rival_that_cannot_run_is_told_beside_the_rest(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "torch_steps", torch_steps)
    found = run("cpu:1", 60)
    (why,) = found.left_out.values()
    assert why.startswith("devices must be two or more for torch.distributed.pipelining")
    assert len(found.figures) == 9


def test_time_that_is_over_leaves_sections_out(few: None) -> None:
    found = run("cpu:1", 1e-9)
    assert [figure.name for figure in found.figures] == ["host copy of 256 MiB"]
    assert found.left_out == dict.fromkeys(list(sections.SECTIONS)[1:], "the time was over")


def test_an_interrupt_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str, __: int) -> Iterator[Figure]:
        yield Figure("one", "ms", (1.0, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("pykern.benchmark.box.SECTIONS", {"a": interrupted, "b": sections.dispatch})
    found = run("cpu:1", 60)
    assert [figure.name for figure in found.figures] == ["one"]
    assert found.left_out == {"a": "interrupted", "b": "interrupted"}


def test_a_section_that_fails_is_told_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of an error has folders and names of users, which the file had too."""
    error = FileNotFoundError(2, "No such file or directory", "/srv/of-alice/model.pt")

    def failing(_: str, __: int) -> Iterator[Figure]:
        yield Figure("one", "ms", (1.0, 1.0))
        raise error

    def other(_: str, __: int) -> Iterator[Figure]:
        yield Figure("two", "ms", (1.0, 1.0))

    monkeypatch.setattr("pykern.benchmark.box.SECTIONS", {"a": failing, "b": other})
    told: list[tuple[str, Exception]] = []
    found = run("cpu:1", 60, failed=lambda *of: told.append(of))
    assert [figure.name for figure in found.figures] == ["one", "two"]
    assert found.left_out == {"a": "FileNotFoundError"}
    assert "alice" not in found.text()
    assert told == [("a", error)]
