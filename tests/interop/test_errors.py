"""Calls that torch refuses are refused, with the same type of error and a text that names the
value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.cases import CPU, OURS, TORCH, Library, batch, make, parts

pytestmark = pytest.mark.usefixtures("_group_of_one")

Misuse = Callable[[Library], Any]


def no_gradients(library: Library) -> None:
    x, y = batch()
    with torch.no_grad():
        make(library, "LoopedBFS", parts(2)).step(x, target=y)


def too_few_rows(library: Library) -> None:
    make(library, "Interleaved1F1B", parts(1), loss_fn=None).step(batch(3)[0])


def unnamed_keyword(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2)).step(x, target=y, mask=x)


def losses_of_another_type(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2)).step(x, target=y, losses=())


def losses_without_a_loss(library: Library) -> None:
    x, _ = batch()
    make(library, "LoopedBFS", parts(1), loss_fn=None).step(x, losses=[])


def no_target(library: Library) -> None:
    make(library, "LoopedBFS", parts(2)).step(batch()[0])


def loss_of_many_numbers(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2), loss_fn=lambda output, target: output - target).step(
        x, target=y
    )


def loss_that_trains_nothing(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2), loss_fn=lambda output, target: target.mean()).step(
        x, target=y
    )


MISUSES: dict[str, tuple[Misuse, type[Exception], str]] = {
    "index": (
        lambda library: library.names.PipelineStage(parts(1)[0], 2, 2, CPU),
        ValueError,
        "stage_index must be 0 to 1 with num_stages=2, got 2",
    ),
    "name": (lambda library: library.schedule("2F2B"), ValueError, "one of '1F1B', .*got '2F2B'"),
    "V of four": (
        lambda library: make(library, "ZBVZeroBubble", parts(3)),
        ValueError,
        "stages must be 2 on each device",
    ),
    "too few microbatches": (
        lambda library: make(library, "DualPipeV", parts(2), count=1),
        ValueError,
        "num_microbatches must be at least 2",
    ),
    "gradients": (
        no_gradients,
        RuntimeError,
        "grad mode must be on in step, got off",
    ),
    "rows": (too_few_rows, ValueError, "n_microbatches must be at most 3, the rows .* got 4"),
    "keyword": (
        unnamed_keyword,
        TypeError,
        "keywords must be named by a stage's forward, got 'mask'",
    ),
    "losses": (losses_of_another_type, TypeError, "losses must be a list, got tuple"),
    "no loss": (
        losses_without_a_loss,
        RuntimeError,
        "losses must be None without a loss_fn, got a list",
    ),
    "no target": (
        no_target,
        RuntimeError,
        "target must be given, got None",
    ),
    "loss": (loss_of_many_numbers, RuntimeError, r"one number .* got \(2, 6\)"),
    "constant": (loss_that_trains_nothing, RuntimeError, "depends on nothing that trains"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    misuse, expected, text = MISUSES[name]
    with pytest.raises(expected, match=text):
        misuse(OURS)
    with pytest.raises(expected):
        misuse(TORCH)


CUT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "whole as well": ({"target": 1, "arg_mbs": [()] * 4}, ValueError, "got arg_mbs and whole"),
    "no list": ({"target_mbs": ()}, TypeError, "target_mbs must be a list, got tuple"),
    "too few": ({"target_mbs": [1]}, ValueError, "entry for each of 4 microbatches, got 1"),
    "no tuples": (
        {"arg_mbs": [1] * 4, "target_mbs": [1] * 4},
        TypeError,
        "list of tuples, got int for microbatch 0",
    ),
    "no dicts": (
        {"kwarg_mbs": [()] * 4, "target_mbs": [1] * 4},
        TypeError,
        "list of dicts, got tuple for microbatch 0",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_batches_that_are_not_cut_well(name: str) -> None:
    given, expected, text = CUT[name]
    schedule = make(OURS, "LoopedBFS", parts(2))
    for method in (schedule.step, schedule.eval):
        with pytest.raises(expected, match=text):
            method(**given)


def stage(**options: Any) -> Any:
    return OURS.names.PipelineStage(parts(1)[0], 0, 2, CPU, **options)


def looped(**options: Any) -> Any:
    return make(OURS, "Interleaved1F1B", parts(2), **options)


# Calls that torch supports, or does not look at.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module": (lambda: OURS.names.PipelineStage(print, 0, 1, CPU), TypeError, "an nn.Module"),
    "group": (lambda: stage(group=object()), ValueError, "group must be left out, got"),
    "dw_builder": (lambda: stage(dw_builder=print), ValueError, "dw_builder must be left out, got"),
    "get_mesh": (lambda: stage(get_mesh=print), ValueError, "get_mesh must be left out, got"),
    "no stages": (
        lambda: OURS.names.ScheduleGPipe([], 2),
        ValueError,
        "stages must hold at least one stage, got an empty list",
    ),
    "no stage": (
        lambda: OURS.names.ScheduleGPipe(print, 2),
        TypeError,
        "stages must hold PipelineStages, got a",
    ),
    "a stage of two": (
        lambda: OURS.names.ScheduleGPipe(stage(), 2),
        ValueError,
        r"stages must be \[0, 1\] in rank 0 of 1 for ScheduleGPipe, got \[0\]",
    ),
    "counts": (
        lambda: OURS.names.ScheduleGPipe(
            [stage(), OURS.names.PipelineStage(parts(1)[0], 1, 3, CPU)], 2
        ),
        ValueError,
        r"num_stages must be the same in all stages, got \[2, 3\]",
    ),
    "microbatches": (lambda: looped(count=0), ValueError, "num_microbatches"),
    "autograd": (lambda: looped(backward_requires_autograd=False), ValueError, "autograd"),
    "args": (
        lambda: looped(args_chunk_spec=()).step(batch()[0], target=batch()[1]),
        ValueError,
        "args_chunk_spec must have an entry for each of 1 positional arguments, got 0",
    ),
    "kwargs": (
        lambda: looped(kwargs_chunk_spec={"a": None}).eval(batch()[0], b=1),
        ValueError,
        r"kwargs_chunk_spec must be for the arguments of step, \['b'\], got \['a'\]",
    ),
    "number": (
        lambda: looped().eval(torch.tensor(1.0)),
        ValueError,
        r"tensor .* of \(args, kwargs\) must have a dimension to cut into microbatches, "
        r"got a tensor without dimensions",
    ),
    "format": (
        lambda: looped()._load_csv("plan.csv", format="csv"),
        ValueError,
        "format must be one of 'compute_only' or 'compute_comms', got 'csv'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    misuse, expected, text = REFUSED[name]
    with pytest.raises(expected, match=text):
        misuse()


def test_a_plan_for_other_counts(tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("0F0,1F0,1B0,0B0\n")
    with pytest.raises(
        ValueError, match=r"for 2 stages, 4 microbatches and .* got one for 2, 1 and"
    ):
        looped()._load_csv(file)
