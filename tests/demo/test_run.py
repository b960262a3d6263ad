"""The demo itself, at a size that takes no time: its story, its files, and that it learns."""

import errno
import io
import json
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from pykern import Pipeline
from pykern.cli import app
from pykern.demo.files import make_folder
from pykern.demo.progress import progress
from pykern.demo.report import timelines
from pykern.demo.run import DemoSettings, run
from pykern.demo.text import Corpus, batches, even_windows, text_file
from pykern.demo.train import held_out_loss, train
from pykern.models import gpt, next_token_loss
from pykern.plan import Costs, Plan, simulate
from pykern.schedules import gpipe, hanayo, interleaved
from tests.fake_cuda.host_gpus import host_gpus

TINY = DemoSettings(
    steps=3, blocks=1, width=8, heads=1, context=8, batch=4, held_out_windows=2, sample_bytes=9
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    return text_file(path, TINY.window)


def tell(
    plan: Plan, corpus: Corpus, out: Path, width: int = 100, devices: str | None = None
) -> str:
    """The output of the tiny demo where nobody watches."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    run(plan, devices or f"cpu:{plan.num_devices}", corpus, out, console, TINY)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("plan", [hanayo(2, 4, waves=2), interleaved(2, 4), gpipe(3, 5)], ids=repr)
def test_it_tells_the_whole_story(plan: Plan, corpus: Corpus, tmp_path: Path) -> None:
    story = tell(plan, corpus, tmp_path)
    expected = [
        f"cut into {plan.num_stages} stages on {plan.num_devices} devices",
        "stage  layers",
        f"Training on {corpus.source}",
        "step 1/3  loss 5.",
        "step 3/3  loss 5.",
        "Held-out loss in nats per byte: 5.",
        "The model writes:",
        "  def ",
        "measured (last step)  makespan",
        "predicted  makespan",
        f"{tmp_path / 'timeline.png'}: ",
        f"{tmp_path / 'trace.json'}: ",
        "Next:",
    ]
    places = [story.find(part) for part in expected]
    assert -1 not in places
    assert places == sorted(places)


def test_on_gpus_it_is_the_same(corpus: Corpus, tmp_path: Path) -> None:
    def losses(story: str) -> list[str]:
        return re.findall(r"loss (\d\.\d+)", story)

    plan = hanayo(2, 4)
    by_workers = tell(plan, corpus, tmp_path)
    with host_gpus(2):
        on_gpus = tell(plan, corpus, tmp_path, devices="cuda")
    assert losses(on_gpus) == losses(by_workers)
    assert "measured (last step)  makespan" in on_gpus


def test_it_leaves_a_picture_and_a_trace_of_both_timelines(corpus: Corpus, tmp_path: Path) -> None:
    plan = hanayo(2, 4)
    tell(plan, corpus, tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["measured (last step)", "predicted"]
    for process in range(2):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        assert len(spans) == plan.num_actions


def test_one_core_is_told_in_the_singular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykern.demo.report.usable_cores", lambda: 1)
    timeline = simulate(hanayo(2, 2), Costs(1, 2))
    out = io.StringIO()
    timelines(Console(file=out), timeline, timeline, tmp_path, by_workers=True)
    assert "2 workers share 1 core here" in out.getvalue()


def test_the_same_demo_tells_the_same_numbers(corpus: Corpus, tmp_path: Path) -> None:
    def numbers() -> list[str]:
        story = tell(hanayo(2, 4), corpus, tmp_path)
        return re.findall(r"loss \d\.\d+|\d\.\d+ (?:before|after)", story)

    first = numbers()
    assert len(first) == 7
    assert first == numbers()


def test_it_can_do_without_matplotlib(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    story = tell(gpipe(2, 2), corpus, tmp_path)
    assert "no timeline.png: " in story
    assert "pykern-runtime[viz]" in story
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "trace.json"]


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal_is_enough(width: int, corpus: Corpus, tmp_path: Path) -> None:
    assert "Next:" in tell(gpipe(2, 2), corpus, tmp_path, width)


class Plain(nn.Sequential):
    """A model that trains itself as a pipeline would, without one."""

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        loss = next_token_loss(self(x), target)
        loss.backward()
        return loss.detach()

    def tracing(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_training_by_the_pipeline_is_training_the_plain_model(corpus: Corpus) -> None:
    data = list(islice(batches(corpus.training, 4, TINY.window, 0), 9))
    sizes: dict[str, Any] = {"layers": 1, "width": 8, "heads": 1, "context": 8}
    with Pipeline(
        gpt(**sizes), devices="cpu:2", schedule=hanayo(2, 4), loss_fn=next_token_loss
    ) as pipe:
        losses = list(train(pipe, data, 9, 1e-2))
    plain = list(train(Plain(*gpt(**sizes)), data, 9, 1e-2))  # type: ignore[arg-type]
    assert losses == pytest.approx(plain, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1


def test_it_learns_text_that_it_never_saw(corpus: Corpus) -> None:
    model = gpt(layers=1, width=32, heads=2, context=8)
    held_out = even_windows(corpus.held_out, 4, TINY.window)
    with Pipeline(model, devices="cpu:2", schedule=gpipe(2, 4), loss_fn=next_token_loss) as pipe:
        before = held_out_loss(pipe, *held_out)
        losses = list(train(pipe, batches(corpus.training, 16, TINY.window, 0), 80, 1e-2))
        after = held_out_loss(pipe, *held_out)
    assert len(losses) == 80
    assert before == pytest.approx(5.5, abs=0.3)
    assert after < before / 3
    model.eval()
    with torch.no_grad():
        plain = next_token_loss(model(held_out[0]), held_out[1]).item()
    assert after == pytest.approx(plain, rel=1e-5)


def test_progress_passes_every_loss_on_and_prints_few_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    losses = [1 / (step + 1) for step in range(1000)]
    assert list(progress(console, losses, 1000)) == losses
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 10 <= len(lines) <= 12
    assert lines[0].startswith("step    1/1000  loss 1.000")
    assert lines[-1].startswith("step 1000/1000  loss 0.001")


def test_progress_is_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    assert list(progress(console, [2.0, 1.0], 2)) == [2.0, 1.0]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2/2  loss 1.000" in shown
    assert "step" not in shown


def test_a_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="--out must be a folder that may be written to, got"):
        make_folder(tmp_path)


def test_a_disk_that_is_full_in_the_end_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "trace.json")

    monkeypatch.setattr("pykern.demo.run.run", full)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (2, "pykern: trace.json: No space left on device\n")
