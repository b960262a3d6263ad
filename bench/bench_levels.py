"""Claim: operations that keep half as much for the backward cost a step next to nothing.

A model is one stage and runs all forwards before its backwards, so that all microbatches are alive
at once. Baseline: operations that keep all that their backward reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import Budget, schedules
from pykern.budget.live_bytes import LiveBytes
from pykern.models import gpt, llama, next_token_loss
from pykern.runtime.recompute.recompute import LEVELS, Level

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge
from .live import counted_bytes

_MODELS: dict[str, Callable[[int, int], nn.Sequential]] = {
    "GPT": lambda layers, width: gpt(layers=layers, width=width, heads=8),
    "Llama": lambda layers, width: llama(layers=layers, width=width, hidden=width * 7 // 2),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _MODELS)
def test_levels(
    name: str, benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """A step of a model at each level, and the most bytes of activations that it had alive."""
    layers, width, num_microbatches, length = (1, 32, 2, 8) if smoke else (4, 256, 4, 128)
    model = _MODELS[name](layers, width)
    ids = torch.randint(
        256, (2, num_microbatches, length), generator=torch.Generator().manual_seed(0)
    )
    chains = [copy.deepcopy(model) for _ in LEVELS]
    contenders = list(map(_contender, LEVELS, chains, [ids] * len(LEVELS)))
    none, ops, stash, layer, stage = contenders
    assert_same_answer([none, ops, layer, stage], tolerance=0.0)
    assert_same_answer([none, stash], tolerance=0.05)
    peaks = {contender.name: _peak_mib(contender) for contender in contenders}
    assert peaks["none"] > peaks["ops"] > peaks["ops+stash"] > peaks["layer"]
    samples = interleave(benchmark, contenders, rounds=1 if smoke else 20)
    if smoke:
        return
    case = f"{name}, {layers} blocks of width {width}, {num_microbatches} microbatches of {length}"
    records = judge("levels", case, samples, "none", lambda *_: {})
    report([replace(record, figures={"peak MiB": peaks[record.contender]}) for record in records])


def _contender(level: Level, chain: nn.Sequential, ids: Tensor) -> Contender:
    pipe = pykern.Pipeline(
        chain,
        devices="cpu:1",
        schedule=schedules.gpipe(1, ids.shape[1]),
        loss_fn=next_token_loss,
        recompute=level,
    )
    return in_this_process(level, chain, 1, lambda: pipe.step(ids[0], target=ids[1]))


def _peak_mib(contender: Contender) -> float:
    """Peak of a step that finds gradients to add to, so that all it makes is activations."""
    contender.prepare()
    contender.step()
    live = LiveBytes()
    with live:
        contender.step()
    return live.peak / 2**20


@pytest.mark.timeout(300)
def test_budgets(
    benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """A step on four devices at each level and within budgets, as shares of what none holds."""
    layers, width, num_microbatches, length = (8, 32, 4, 8) if smoke else (16, 128, 8, 64)
    model = gpt(layers=layers, width=width, heads=8)
    rows = 1 if smoke else 2
    ids = torch.randint(256, (2, rows * num_microbatches, length))
    figures: dict[str, dict[str, float]] = {}
    contenders = []
    whole = 0.0
    # The smallest budget is too small for the smallest model.
    budgets = {"70 % of none": 0.7} if smoke else BUDGETS
    for name in (*LEVELS, *budgets):
        asked = budgets.get(name)
        recompute = name if asked is None else Budget(asked * whole, ids[0, :rows], ids[1, :rows])
        contender, figures[name] = _on_four(name, model, num_microbatches, ids, recompute)
        contenders.append(contender)
        if name == "none":
            whole = figures[name]["peak KiB"] * 1024
    stash = contenders.pop(LEVELS.index("ops+stash"))
    assert_same_answer(contenders, tolerance=0.0)
    for name, share in budgets.items():
        assert figures[name]["peak KiB"] <= figures[name]["predicted KiB"] <= share * whole / 1024
    contenders.append(stash)
    samples = interleave(benchmark, contenders, rounds=1 if smoke else 15)
    if smoke:
        return
    case = f"GPT, {layers} blocks of width {width}, 4 devices, {num_microbatches} microbatches"
    records = judge("budgets", case, samples, "none", lambda *_: {})
    report([replace(record, figures=figures[record.contender]) for record in records])


BUDGETS = {"70 % of none": 0.7, "50 % of none": 0.5, "30 % of none": 0.3}


def _on_four(
    name: str, model: nn.Sequential, num_microbatches: int, ids: Tensor, recompute: Any
) -> tuple[Contender, dict[str, float]]:
    chain = copy.deepcopy(model)
    pipe = pykern.Pipeline(
        chain,
        devices="cpu:4",
        microbatches=num_microbatches,
        loss_fn=next_token_loss,
        recompute=recompute,
    )
    contender = in_this_process(name, chain, 4, lambda: pipe.step(ids[0], target=ids[1]))
    contender.prepare()
    contender.step()
    with counted_bytes(pipe) as devices:
        contender.step()
    figures = {"peak KiB": max(live.peak for live in devices) / 1024}
    if pipe.fitted is not None:
        figures["predicted KiB"] = max(pipe.fitted.peak_bytes) / 1024
        figures["predicted ms"] = pipe.fitted.timeline.makespan_ns / 1e6
    return contender, figures
