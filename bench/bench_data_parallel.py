"""Claim: gradients are summed over processes while other stages still compute.

Two processes, each with a pipeline of two workers and a batch of its own; gloo between them.
Baseline: the same pipelines without a process group, and one sum of all gradients after the step.
Two processes of two workers have four threads here, so what the sums take they take from somebody.
"""

from __future__ import annotations

import copy
import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

import pykern
from pykern.models import gpt, next_token_loss

from .harness import Contender, PlainRounds, Record, gradients_of, interleave, judge

_NUM_PROCESSES = 2
_BASELINE = "sums after the step"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_data_parallel(
    schedule: str,
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
    tmp_path: Path,
) -> None:
    """A step of both processes, by the clock of the first."""
    width, rounds = (16, 1) if smoke else (256, 15)
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(_NUM_PROCESSES)]
    processes = [
        context.Process(
            target=_serve, args=(rank, tmp_path / "store", schedule, width, rounds, writer)
        )
        for rank, (_, writer) in enumerate(ends)
    ]

    def run() -> list[Any]:
        for process in processes:
            process.start()
        for _, writer in ends:
            writer.close()
        return [reader.recv() for reader, _ in ends]

    (samples, hidden), _ = benchmark.pedantic(run, rounds=1, warmup_rounds=0)
    for process in processes:
        process.join()
    if smoke:
        return

    def figures(median_ms: float, baseline_ms: float) -> dict[str, float]:
        speed_up = {"speed-up": baseline_ms / median_ms}
        return speed_up if median_ms == baseline_ms else {**speed_up, "hidden": hidden}

    case = f"{schedule}, small GPT, {_NUM_PROCESSES} processes of 2 workers, 8 microbatches"
    report(judge("data_parallel", case, samples, _BASELINE, figures))


def _serve(rank: int, store: Path, schedule: str, width: int, rounds: int, writer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(store), _NUM_PROCESSES),
        rank=rank,
        world_size=_NUM_PROCESSES,
    )
    torch.manual_seed(0)
    model = gpt(vocab=64, layers=4, width=width, context=64)
    torch.manual_seed(rank)
    ids = torch.randint(64, (8, 64))
    batch = (ids, ids.roll(-1, 1))
    overlapped = _pipeline(model, schedule, {"process_group": dist.group.WORLD})
    plain = _pipeline(model, schedule, {})
    contenders = [
        _contender(_BASELINE, plain, batch, lambda: _sum_all(plain)),
        _contender("process_group", overlapped, batch, lambda: None),
    ]
    _assert_same_gradients(contenders)
    samples = interleave(PlainRounds(), contenders, rounds, settle_s=0.02)
    writer.send((samples, statistics.median(_hidden(contenders[1], overlapped) for _ in range(5))))
    overlapped.close()
    plain.close()
    dist.destroy_process_group()


def _pipeline(model: nn.Sequential, schedule: str, options: dict[str, Any]) -> pykern.Pipeline:
    return pykern.Pipeline(
        copy.deepcopy(model),
        devices="cpu:2",
        schedule=schedule,
        microbatches=8,
        loss_fn=next_token_loss,
        reduction="sum",
        **options,
    )


def _sum_all(pipe: pykern.Pipeline) -> None:
    """As one would without the pipeline's help: one bucket, one collective."""
    gradients = list(gradients_of(pipe).values())
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _contender(
    name: str, pipe: pykern.Pipeline, batch: tuple[Tensor, Tensor], after: Callable[[], None]
) -> Contender:
    def prepare() -> None:
        pipe.zero_grad()
        dist.barrier()

    def step() -> float:
        loss = pipe.step(batch[0], target=batch[1])
        after()
        return loss.item()

    return Contender(name, step, lambda: gradients_of(pipe), prepare)


def _assert_same_gradients(contenders: list[Contender]) -> None:
    found: list[Mapping[str, Tensor]] = []
    for contender in contenders:
        contender.prepare()
        contender.step()
        found.append(contender.gradients())
    first, second = found
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def _hidden(contender: Contender, pipe: pykern.Pipeline) -> float:
    """The share of the time of all sums that was over before the last action of a step."""
    contender.prepare()
    contender.step()
    end = max(row[-1].end_ns for row in pipe.timeline().rows)
    spans = [span for row in pipe.reductions().rows for span in row]
    total = sum(span.end_ns - span.start_ns for span in spans)
    return sum(max(min(span.end_ns, end) - span.start_ns, 0) for span in spans) / total
