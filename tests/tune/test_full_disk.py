"""A disk that fills while a model is measured loses no measurement."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from tests.support.full_disk import full_disk


def tuned(path: Path, **more: Any) -> pykern.Choice:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.ones(4, 8)
    return pykern.tune(
        model, sample=x, target=x, devices="cpu:2", loss_fn=F.mse_loss, resume=path, **more
    )


def on_a_full_disk(call: Callable[[], pykern.Choice], path: Path) -> pykern.Choice:
    message = f"measurements were not kept in {path}: File too large. Tuning goes on"
    with full_disk(100), pytest.warns(UserWarning, match=message) as warned:
        choice = call()
    assert Path(warned[0].filename) == Path(__file__)
    return choice


def test_measurements_outlive_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    assert on_a_full_disk(lambda: tuned(path), path).proposals
    assert list(tmp_path.iterdir()) == []


def test_measurements_of_before_outlive_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    before = tuned(path).measured
    text = path.read_text()
    # More is measured where a memory is given.
    choice = on_a_full_disk(lambda: tuned(path, memory=2**30), path)
    assert (choice.measured.times_ns, path.read_text()) == (before.times_ns, text)
