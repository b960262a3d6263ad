"""Claim: a stream of batches keeps all workers busy, from one batch to the next.

Forward only, two stages on two workers. Beside the model without a pipeline, and beside the same
pipeline called once for each batch, which drains between two. Baseline: the plain model on one
thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.models import gpt

from .harness import Contender, Record, interleave, judge

_NUM_DEVICES = 2
_ROWS = 8

# Threads of a contender with two of them spin for some milliseconds after their last work.
_SETTLE_S = 0.02

Outputs = Callable[[list[Tensor]], Iterable[Tensor]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stream(
    num_microbatches: int,
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
) -> None:
    """A pass over batches, each cut into so many microbatches."""
    width, length, num_batches, rounds = (16, 8, 3, 1) if smoke else (256, 64, 12, 15)
    torch.manual_seed(0)
    # From hidden states to hidden states, so that both stages are alike.
    model = nn.Sequential(*list(gpt(vocab=8, layers=4, width=width, context=length))[1:-1]).eval()
    batches = list(torch.randn(num_batches, _ROWS, length, width))
    pipe = pykern.Pipeline(
        copy.deepcopy(model),
        devices=f"cpu:{_NUM_DEVICES}",
        microbatches=num_microbatches,
        balance="layers",
    )
    passes: dict[str, tuple[int, Outputs]] = {
        "plain model, 1 thread": (1, lambda batches: map(model, batches)),
        "plain model, 2 threads": (2, lambda batches: map(model, batches)),
        "pipe(batch), 2 workers": (2, lambda batches: map(pipe, batches)),
        "pipe.stream, 2 workers": (2, pipe.stream),
    }
    _assert_same_outputs(model, batches, passes, num_microbatches)
    contenders = [_contender(name, *passes[name], batches) for name in passes]
    samples = interleave(benchmark, contenders, rounds, settle_s=_SETTLE_S)
    if smoke:
        return

    def figures(median_ms: float, plain_ms: float) -> dict[str, float]:
        rows = num_batches * _ROWS
        return {"rows/s": rows / median_ms * 1e3, "speed-up": plain_ms / median_ms}

    case = f"{num_batches} batches of {_ROWS} rows, {num_microbatches} microbatches each"
    report(judge("stream", case, samples, "plain model, 1 thread", figures))


def _assert_same_outputs(
    model: nn.Module,
    batches: list[Tensor],
    passes: dict[str, tuple[int, Outputs]],
    num_microbatches: int,
) -> None:
    """Pipelines give the bits of the model microbatch by microbatch; it alone, much the same."""
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = [torch.cat([model(x) for x in b.chunk(num_microbatches)]) for b in batches]
    for name, (num_threads, outputs) in passes.items():
        torch.set_num_threads(num_threads)
        with torch.no_grad():
            found = list(outputs(batches))
        assert len(found) == len(expected), name
        for output, value in zip(found, expected, strict=True):
            if name.startswith("pipe"):
                assert torch.equal(output, value), name
            torch.testing.assert_close(output, value)


def _contender(name: str, num_threads: int, outputs: Outputs, batches: list[Tensor]) -> Contender:
    def step() -> float:
        with torch.no_grad():
            return sum(output[0, 0, 0].item() for output in outputs(batches))

    return Contender(name, step, dict, lambda: torch.set_num_threads(num_threads))
