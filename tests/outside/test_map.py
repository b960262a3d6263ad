"""`pipe.map`: a loss of each call, with the bits and the memory of a step."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.pipeline.combinations import REFUSED
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned, small
from tests.support.plain_step import plain_step

NUM_MICROBATCHES = 8
OPTIONS: list[dict[str, Any]] = [
    *({"schedule": name} for name in ("gpipe", "one_f_one_b", "interleaved", "zb_v")),
    *({"recompute": level} for level in ("stage", "layer")),
]


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Tanh()) for _ in range(4))
    )


def batch(rows: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(rows, 4), torch.randn(rows, 4)


def loss_and_more(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
    return F.mse_loss(output, target), output * 2, len(target)


def check(devices: Any, rows: int, options: dict[str, Any]) -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    x, y = batch(rows)
    options = {"microbatches": NUM_MICROBATCHES, "devices": devices, "loss_fn": None, **options}
    with small(layers, **options) as pipe:
        for _ in range(2):
            state = torch.get_rng_state()
            expected = plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES, pipe.partition.stages)
            torch.set_rng_state(state)
            found = pipe.map(loss_and_more, x, target=y)
            assert_same_state(pipe, plain)
            assert sum(count for *_, count in found) == rows
            assert torch.cat([more for _, more, _ in found]).shape == x.shape
            assert not any(part.requires_grad for loss, more, _ in found for part in (loss, more))
            total = sum(loss * (count / rows) for loss, _, count in found)
            torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("rows", [20, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loss_of_the_call_has_the_bits_of_a_step(options: dict[str, Any], rows: int) -> None:
    check("cpu:2", rows, options)


@pytest.mark.parametrize("options", [*OPTIONS, {"capture": "auto"}], ids=str)
def test_gpus_have_them_too(options: dict[str, Any], gpus: FakeCuda) -> None:
    check(["cuda:0", "cuda:1"], 20, options)
    assert gpus.violations == []


def test_every_call_has_its_own_function() -> None:
    layers = model().eval()
    plain = copy.deepcopy(layers)
    x, _ = batch(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with small(layers, loss_fn=None, reduction="sum") as pipe:
        for function in (torch.sum, torch.Tensor.norm, lambda output: output.square().mean()):
            losses = pipe.map(function, x)
            for part, loss in zip(x.chunk(2), losses, strict=True):
                expected = function(plain(part))
                expected.backward()
                torch.testing.assert_close(loss, expected.detach())
        pipe.map(torch.sum, x, scaler=scaler)
        (scaler.scale(plain(x).sum())).backward()
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(("schedule", "most"), [("one_f_one_b", 1), ("gpipe", NUM_MICROBATCHES)])
def test_the_memory_is_that_of_the_plan(schedule: str, most: int) -> None:
    """Outputs of the last stage that are held at once."""
    held: list[weakref.ref[Tensor]] = []
    counts = []

    def function(output: Tensor) -> Tensor:
        held.append(weakref.ref(output))
        counts.append(sum(one() is not None for one in held))
        return output.square().mean()

    plan = getattr(schedules, schedule)(2, NUM_MICROBATCHES)
    with planned(model(), plan, loss_fn=None) as pipe:
        pipe.map(function, batch(16)[0])
    assert max(counts) == most


def test_a_call_leaves_nothing_to_the_garbage_collector() -> None:
    x, y = batch()
    with planned(model(), schedules.one_f_one_b(2, 4), None) as pipe:
        pipe.map(loss_and_more, x, target=y)

        def call() -> weakref.ref[Any]:
            def function(output: Tensor, target: Tensor) -> Tensor:
                return F.mse_loss(output, target)

            pipe.map(function, x, target=y)
            return weakref.ref(function)

        gc.collect()
        gc.disable()
        try:
            assert call()() is None
        finally:
            gc.enable()


def test_a_fault_of_the_function_is_the_callers() -> None:
    fault = ValueError("not this one")
    x, _ = batch(8)

    def failing(output: Tensor) -> Tensor:
        raise fault

    with small(model(), loss_fn=None) as pipe:
        with pytest.raises(ValueError, match="not this one") as raised:
            pipe.map(failing, x)
        assert raised.value is fault
        with pytest.raises(ValueError, match="must return a tensor without dimensions"):
            pipe.map(lambda output: output, x)
        with pytest.raises(ValueError, match="must return a tensor without dimensions"):
            pipe.map(lambda output: (), x)
        with pytest.raises(TypeError, match="function must be callable, got Tensor"):
            pipe.map(x, torch.sum)  # type: ignore[arg-type]
        with torch.no_grad(), pytest.raises(RuntimeError, match="grad mode must be on in"):
            pipe.map(torch.sum, x)
        assert len(pipe.map(torch.sum, x)) == 2


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("verify", lambda: small(model(), verify=True)),
        ("a plan of replicas", lambda: small(model(), schedule="chimera")),
        (
            "optimizer",
            lambda: pykern.AsyncPipeline(
                model(),
                devices="cpu:2",
                microbatches=2,
                loss_fn=F.mse_loss,
                schedule="pipedream",
                optimizer=torch.optim.SGD,
            ),
        ),
    ],
)
def test_a_loss_of_the_call_is_refused(name: str, make: Callable[[], pykern.Pipeline]) -> None:
    message = re.escape(REFUSED[name, "a loss of a call"])
    with make() as pipe, pytest.raises(ValueError, match=message):
        pipe.map(torch.sum, batch(8)[0])


def test_graphs_that_have_to_be_take_no_loss_of_a_call(gpus: FakeCuda) -> None:
    devices = ["cuda:0", "cuda:1"]
    message = re.escape(REFUSED["capture that has to be", "a loss of a call"])
    made = small(model(), devices=devices, capture=True)
    with made as pipe, pytest.raises(ValueError, match=message):
        pipe.map(torch.sum, batch(8)[0])
    assert gpus.violations == []
