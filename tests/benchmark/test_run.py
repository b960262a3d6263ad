"""A run on workers measures every section, within its time, and loses nothing to an interrupt."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pykern.benchmark import Figure, box, compare, load, run, sections, torch_processes
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
    assert found.left_out == _over(1)


def _over(last: int) -> dict[str, str]:
    """The reasons of all sections where the time is over within the first."""
    first, *others = sections.SECTIONS
    reason = "the time was over"
    cut = f"all behind its figure {last}, since {reason}"
    return {first: cut, **dict.fromkeys(others, reason)}


@pytest.mark.parametrize("figure_s", [torch_processes._LIMITS_S["cpu"], 1.0])
def test_a_run_on_workers_ends_within_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure_s: float
) -> None:
    """Each figure takes as long as one may on workers, and the file is read back."""
    now, number = [0.0], itertools.count()

    def section(devices: str, num_devices: int) -> Iterator[Figure]:
        for _ in range(5):
            now[0] += figure_s
            yield Figure(f"a figure {next(number)}", "ms", (1.0, 2.0))

    monkeypatch.setattr(box, "SECTIONS", dict.fromkeys(sections.SECTIONS, section))
    monkeypatch.setattr(box, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "box.json"
    done = CliRunner().invoke(app, ["bench", "box", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert now[0] < 300
    found = load(path)
    assert len(found.figures) == now[0] / figure_s
    if figure_s == 1.0:
        assert found.left_out == {}
    else:
        assert found.left_out == _over(5)
        assert "dispatch left out: the time was over" in done.stdout
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 0


@pytest.mark.parametrize(
    ("step_s", "num_steps", "num_times"), [(0.001, 12, 9), (6.0, 4, 2), (15.0, 2, 2), (60.0, 2, 2)]
)
def test_slow_steps_are_fewer(
    monkeypatch: pytest.MonkeyPatch, step_s: float, num_steps: int, num_times: int
) -> None:
    """A figure of steps of up to 15 s ends within the limit of the slowest figure on workers."""
    now = [0.0]

    def step() -> None:
        now[0] += step_s

    clock = SimpleNamespace(perf_counter_ns=lambda: round(1e9 * now[0]))
    monkeypatch.setattr(sections, "time", clock)
    assert sections._timed(step) == [round(1e9 * step_s)] * num_times
    assert now[0] == pytest.approx(num_steps * step_s)
    assert now[0] < torch_processes._LIMITS_S["cpu"] or step_s > 15


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
