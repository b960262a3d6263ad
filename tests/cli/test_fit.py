"""`pykern fit`: its table, its verdict, its exit codes, and what it refuses in one line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pykern.boxes import BoxDevice, load, save
from pykern.cli import app

USERS = """
import torch
import torch.nn.functional as F
from torch import nn

def wide():
    # Without weights: these would be 64 GiB.
    model = nn.Sequential(*(nn.Linear(2**16, 2**16, bias=False) for _ in range(4)))
    x = torch.empty(64, 2**16)
    return model, x, x, F.mse_loss

def narrow(arguments):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, arguments, torch.empty(8, 8), F.mse_loss

def alone():
    return narrow(torch.empty(8, 8))

def in_a_tuple():
    return narrow((torch.empty(8, 8),))

class Looks(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return -y if y.sum().item() > 0 else y

class Masks(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y + y[y > 0].sum()

def looks(kind=Looks):
    x = torch.empty(8, 8)
    return nn.Sequential(kind(8, 8), nn.Linear(8, 8)), x, x, F.mse_loss

def masks():
    return looks(Masks)

class Arrays(nn.Linear):
    def forward(self, x):
        return super().forward(x) * len(x.detach().numpy())

class Prints(nn.Linear):
    def forward(self, x):
        print(f"{x.detach().sum():.2f}")
        return super().forward(x)

class Broken(nn.Linear):
    def forward(self, x):
        raise RuntimeError("a fault of the model")

def arrays():
    return looks(Arrays)

def prints():
    return looks(Prints)

def broken():
    return looks(Broken)

def held():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    x = torch.empty(2**16, 256)
    return model, x, x, F.mse_loss
"""


@pytest.fixture(autouse=True)
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fitted.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def fit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit", *arguments], env={"COLUMNS": "100"})


def test_a_model_that_fits() -> None:
    result = fit("fitted:wide", "--devices", "2", "--memory", "256", "--optimizer", "SGD")
    assert result.exit_code == 0, result.stderr
    # Two layers each, and as much in gradients.
    rows = [line.split()[:4] for line in result.stdout.splitlines()[2:4]]
    assert rows == [["0", "32.000", "32.000", "0.000"], ["1", "32.000", "32.000", "0.000"]]
    assert "It fits in 256 GiB: the most is 80." in result.stdout


def test_inputs_may_be_a_tuple_of_arguments() -> None:
    alone, of_tuple = (fit(f"fitted:{name}", "--devices", "2") for name in ("alone", "in_a_tuple"))
    assert of_tuple.exit_code == 0, of_tuple.exception
    assert of_tuple.stdout == alone.stdout


def test_a_model_that_needs_a_change() -> None:
    result = fit("fitted:held", "--devices", "2", "--memory", "0.25", "--microbatches", "2")
    assert result.exit_code == 1
    assert "It does not fit in 0.25 GiB: the most is 0." in result.stdout
    assert "It fits with microbatches=8: the most is 0." in result.stdout


# Every change of the default model is tried: 11 s, and longer on a busy machine.
@pytest.mark.timeout(200)
def test_less_than_a_mebibyte_is_not_0() -> None:
    result = fit("--devices", "2", "--memory", "0.0001")
    assert result.exit_code == 1
    assert re.search(r"does not fit in 0\.0001 GiB: the most is 0\.000[1-9]", result.stdout)


def test_a_model_that_cannot_be_made_to_fit() -> None:
    result = fit("fitted:wide", "--devices", "2", "--memory", "40", "--recompute", "stage")
    assert result.exit_code == 1
    assert "Take more devices." in result.stdout


def test_a_box_tells_number_and_memory_of_devices() -> None:
    box = load("rtx3090x2")
    result = fit("fitted:wide", "--box", "rtx3090x2", "--optimizer", "SGD")
    assert result.exit_code == 1, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[2:4]] == ["0", "1"]
    room = f"{24e9 / 2**30:.4g} GiB of {box.name} (published, not measured)"
    assert f"It does not fit in {room}: the most is 80." in result.stdout


def test_each_device_of_a_box_is_held_against_its_own_memory(tmp_path: Path) -> None:
    box = load("rtx3090x2")
    for gib, code in ((128, 0), (64, 1)):
        devices = [replace(box.devices[0], memory_bytes=of * 2.0**30) for of in (256, gib)]
        save(replace(box, devices=tuple(devices)), tmp_path / "box.json")
        result = fit("fitted:wide", "--box", str(tmp_path / "box.json"), "--optimizer", "SGD")
        assert result.exit_code == code, result.output
        assert f"in {gib} to 256 GiB of" in result.stdout


def test_fewer_devices_of_a_box_may_be_taken_and_not_more(tmp_path: Path) -> None:
    assert fit("fitted:held", "--box", "a100x4", "--devices", "2").exit_code == 0
    refused = fit("fitted:held", "--box", "a100x4", "--devices", "8")
    assert "devices must be at most 4, as many as the box has, got 8" in refused.stderr
    refused = fit("fitted:held", "--box", "a100x4", "--memory", "80")
    assert "--memory must not go with --box" in refused.stderr
    cores = replace(
        load("a100x4"), devices=(BoxDevice("CPU core", None, 8.0, None, None, None),) * 4
    )
    save(cores, tmp_path / "cores.json")
    refused = fit("fitted:held", "--box", str(tmp_path / "cores.json"))
    assert "the box must tell its devices[0].memory_bytes for a prediction" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "Foo"], "--optimizer must be a class of torch.optim or none, got 'Foo'"),
        (["--optimizer", "Optimizer"], "must be a class of torch.optim or none, got 'Optimizer'"),
        (["--optimizer", "LBFGS"], "optimizer must step without values and without a closure"),
        (["--optimizer", "SparseAdam"], "SparseAdam does not support dense gradients"),
        (
            ["fitted:nothing"],
            "the model must be a function of the module fitted, got 'nothing', which is not there",
        ),
        (["fitted:held", "--devices", "9"], "at least 9 layers"),
        (
            ["fitted:looks", "--devices", "2"],
            "must not look at values, got aten._local_scalar_dense.default at fitted.py:25. Call",
        ),
        (["fitted:masks", "--devices", "2"], "got aten.nonzero.default at fitted.py:30. Call py"),
        (["fitted:arrays", "--devices", "2"], "got .numpy() at fitted.py:41. Call pykern.estim"),
        (["fitted:prints", "--devices", "2"], "got __format__ at fitted.py:45. Call pykern.estim"),
        (["--schedule", "foo"], "foo"),
        (["--schedule", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str) -> None:
    result = fit(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_fault_of_the_model_is_shown_where_it_is() -> None:
    result = fit("fitted:broken", "--devices", "2")
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception) == "a fault of the model"
