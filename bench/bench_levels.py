"""Claim: operations that keep half as much for the backward cost a step next to nothing.

A model is one stage and runs all forwards before its backwards, so that all microbatches are alive
at once. Baseline: operations that keep all that their backward reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.live_bytes import LiveBytes
from pykern.models import gpt, llama, next_token_loss
from pykern.runtime.recompute import LEVELS, Level

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

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
    """Of a step that finds gradients to add to, so that all it makes is activations."""
    contender.prepare()
    contender.step()
    live = LiveBytes()
    with live:
        contender.step()
    return live.peak / 2**20
