"""Scripts are rehearsed: waits by line, memory, errors, and missing pipelines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pykern.boxes import load, save
from tests.rehearse.scripts import line_with, rehearse, written

SCRIPT = """
import torch
from torch import nn
import pykern

class Layer(nn.Linear):
    def forward(self, x):
        if x.sum() > 1e9:  # in an action
            x = x / 2
        return super().forward(x)

layers = [nn.Linear(8, 8), Layer(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)]
mse = nn.functional.mse_loss
pipe = pykern.Pipeline(layers, devices="cuda", microbatches=4, capture=True, loss_fn=mse)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
batch = torch.randn(8, 8)
assert batch.sum().item() != 0  # of the host
there = batch.cuda()
for step in range(5):
    loss = pipe.step(there, target=batch.to("cuda"))
    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.item()  # planted
    print(f"loss {loss:.3f}")  # printed
    torch.cuda.synchronize()
assert not torch.equal(there + 1, batch)
raise SystemExit("not reached: the rehearsal ends after three steps")
"""


@pytest.mark.timeout(120)
def test_waits_are_told_by_line_and_the_step_is_drawn(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT)
    files = {end: tmp_path / f"step{end}" for end in (".html", ".json", ".svg")}
    named = zip(("--html", "--trace", "--picture"), map(str, files.values()), strict=True)
    seen = rehearse(script, tmp_path, options=[part for option in named for part in option])
    assert seen.status == 0, seen.err
    waits = {
        (one["line"], one["inside"], one["call"], one["action"]): one["times"]
        for one in seen.seen["waits"]
    }
    planted, printed = line_with(script, "# planted"), line_with(script, "# printed")
    assert waits.pop((planted, "", "item", "")) == 3
    assert waits.pop((printed, "", "format", "")) == 3
    assert waits.pop((line_with(script, "torch.cuda.synchronize()"), "", "synchronize", "")) == 3
    in_layer = line_with(script, "# in an action"), "", "bool", "F of stage 0"
    assert waits.pop(in_layer) == 3 * 4
    (inside,) = waits
    assert inside == (line_with(script, "clip_grad_norm_"), "torch", "bool", "")
    assert waits[inside] == 3
    assert f"train.py:{planted}" in seen.out
    (pipeline,) = seen.seen["pipelines"]
    assert len(pipeline["losses"]) == 3
    assert any("Dropout" in why and "random" in why for why in pipeline["against_capture"])
    # Reasons against graphs were told as if there were no wait.
    (waits_in,) = [why for why in pipeline["against_capture"] if "the host waits" in why]
    assert waits_in.startswith("F of stage 0: the host waits for a GPU at train.py:")
    # The layer that looks at values has lost neither bytes nor times.
    assert pipeline["fits"] is True
    predicted = pipeline["prediction"]["makespan_ns"]
    page, picture = files[".html"].read_text(), files[".svg"].read_text()
    assert "<title>pykern rehearse</title>" in page
    assert '"label":"predicted"' in page
    assert "predicted" in picture
    events = json.loads(files[".json"].read_text())["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    # Two stages, four microbatches, F and B.
    assert len(actions) == 2 * 4 * 2
    first, last = min(of["ts"] for of in actions), max(of["ts"] + of["dur"] for of in actions)
    assert last - first == pytest.approx(predicted / 1e3, rel=1e-3)


SHARES = """
import sys, torch
from torch import nn
import pykern

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
loss = nn.functional.mse_loss
devices = sys.argv[1] if "/" in sys.argv[1] else sys.argv[1].split()
pipe = pykern.Pipeline(model, devices=devices, microbatches=2, loss_fn=loss)
optimizer = torch.optim.AdamW(pipe.parameters())
x = torch.zeros(64, 512)
pipe.step(x, target=x)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The prediction for two whole GPUs."""
    folder = tmp_path_factory.mktemp("two")
    seen = rehearse(written(folder, SHARES), folder, "cuda:0 cuda:1").seen
    return seen["pipelines"][0]["prediction"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared", ["cuda:0/2", "cuda:0 cuda:0"])
def test_parts_of_a_gpu_are_not_as_fast_as_the_whole(tmp_path: Path, two: Any, shared: str) -> None:
    """A step was predicted to go through parts of a GPU as fast as through so many GPUs."""
    seen = rehearse(written(tmp_path, SHARES), tmp_path, shared).seen
    one = seen["pipelines"][0]["prediction"]
    assert one["update_ns"] == pytest.approx(2 * two["update_ns"])
    # Copies to another GPU take longer than the actions.
    assert two["makespan_ns"] * (1 - two["bubble_ratio"]) == pytest.approx(
        one["makespan_ns"] * (1 - one["bubble_ratio"]) / 2
    )


TOO_LARGE = """
import torch
from torch import nn
import pykern

def linear(): return nn.utils.skip_init(nn.Linear, 30_000, 30_000, bias=False)

model = nn.Sequential(*(linear() for _ in range(4)))
pipe = pykern.Pipeline(model, devices="cuda", microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(pipe.parameters())
x = torch.zeros(8, 30_000)
pipe.step(x, target=x)
raise SystemExit("not reached")
"""


@pytest.mark.timeout(120)
def test_a_script_whose_steps_threads_issue_is_rehearsed(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT.replace("capture=True", 'issue="threads"'))
    seen = rehearse(script, tmp_path)
    assert seen.status == 0, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert len(pipeline["losses"]) == 3


@pytest.mark.timeout(120)
def test_a_step_whose_bytes_are_not_known_has_no_times(tmp_path: Path) -> None:
    text = RATES.replace("pipe.step(x, target", "pipe.step(x[:, :1], y=x[:, 1:], target").replace(
        "torch.nn.Linear(2, 2), torch", "Both(2, 2), torch"
    )
    seen = rehearse(written(tmp_path, BOTH + text), tmp_path)
    assert seen.status == 0, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert (pipeline["fits"], pipeline["devices"]) == (None, [])
    assert pipeline["not_predicted"] == "the bytes between stages are not known"
    assert "Without times, since the bytes between stages are not known." in seen.out
    assert "by the rates of" not in seen.out


BOTH = """
import torch

class Both(torch.nn.Linear):
    def forward(self, x, y):
        return super().forward(torch.cat([x, y], 1))
"""
RATES = """
import pykern, torch
layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
loss = torch.nn.functional.mse_loss
pipe = pykern.Pipeline(list(layers), devices="cuda", microbatches=2, loss_fn=loss)
x = torch.ones(2, 2)
pipe.step(x, target=x)
"""


@pytest.mark.timeout(120)
def test_a_box_without_rates_says_that_times_are_missing(tmp_path: Path) -> None:
    """The summary told of times by the rates of the box, and had no times."""
    rate, box = load("rtx3090x2"), tmp_path / "box.json"
    of = [replace(device, flops_per_ns=None) for device in rate.devices]
    save(replace(rate, devices=tuple(of)), box)
    options = "--picture", str(tmp_path / "step.svg")
    seen = rehearse(written(tmp_path, RATES), tmp_path, box=str(box), options=options)
    # Nothing can be drawn, and all else is told.
    assert seen.status == 2
    assert "picture must be of a step whose times are predicted, got none" in seen.err
    assert not (tmp_path / "step.svg").exists()
    (pipeline,) = seen.seen["pipelines"]
    assert pipeline["prediction"] is None
    assert "lacks operations per time" in pipeline["not_predicted"]
    assert "Without times, since the profile of " in seen.out
    assert "by the rates of" not in seen.out


@pytest.mark.timeout(120)
def test_a_step_that_does_not_fit_is_told_with_the_cheapest_change(tmp_path: Path) -> None:
    """Weights that nobody touches take no memory here; each GPU would need 18 GiB, and state."""
    seen = rehearse(
        written(tmp_path, TOO_LARGE),
        tmp_path,
        box="2x3090",
        options=["--picture", str(tmp_path / "step.svg")],
    )
    # Without a step there are no times to draw.
    assert seen.status == 1, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert pipeline["fits"] is False
    assert pipeline["losses"] == []
    assert pipeline["change"] == "pykern.HostOptimizer"
    assert "It does not fit, so the script was ended before its first step." in seen.out
    assert "It fits with pykern.HostOptimizer." in seen.out


@pytest.mark.timeout(120)
def test_an_error_of_the_script_ends_with_its_traceback(tmp_path: Path) -> None:
    script = written(tmp_path, "def fail():\n    raise ValueError('of the script')\n\nfail()\n")
    seen = rehearse(script, tmp_path)
    assert seen.status == 1
    first, *_, last = seen.err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: of the script"
    assert seen.err.count("File ") == 2
    assert "pykern" not in seen.err


@pytest.mark.timeout(120)
def test_a_script_that_python_cannot_read_ends_without_frames_of_ours(tmp_path: Path) -> None:
    seen = rehearse(written(tmp_path, "x = ("), tmp_path)
    assert seen.status == 1
    assert "SyntaxError: '(' was never closed" in seen.err
    assert "runpy" not in seen.err


MAPS = """
import pykern, torch
pipe = pykern.Pipeline([torch.nn.Linear(2, 2)], devices="cuda:0", microbatches=2)
optimizer = torch.optim.SGD(pipe.parameters())
pipe.map(lambda y: (y.mean() * float("nan"), y), torch.ones(2, 2))
"""


@pytest.mark.timeout(120)
def test_bytes_of_a_map_are_known_and_its_nan_is_no_word_of_json(tmp_path: Path) -> None:
    """Bytes were unknown for want of a loss_fn, and JavaScript could not read the file."""
    seen = rehearse(written(tmp_path, MAPS), tmp_path)
    assert seen.status == 0, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert pipeline["fits"] is True
    assert pipeline["losses"] == [None]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("print('trains nothing')", "got no pipeline"),
        (
            "import pykern, torch\n"
            "pykern.Pipeline([torch.nn.Linear(2, 2)], devices='cpu:1', microbatches=1)",
            "got pipelines of CPU workers",
        ),
        (
            "import pykern, torch\n"
            "pipe = pykern.Pipeline([torch.nn.Linear(2, 2)], devices='cuda:0', microbatches=1)\n"
            "pipe(torch.ones(2, 2)).sum().backward()",
            "got calls alone. Rehearsals look at pipe.step and pipe.map, not at losses outside",
        ),
    ],
)
def test_a_script_without_a_pipeline_is_told(tmp_path: Path, text: str, instead: str) -> None:
    seen = rehearse(written(tmp_path, text), tmp_path)
    assert seen.status == 2
    assert "must take a step of a pykern.Pipeline for GPUs" in seen.err
    assert instead in seen.err


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    seen = rehearse(tmp_path / "none.py", tmp_path)
    assert seen.status == 2
    assert "script must be a file" in seen.err
