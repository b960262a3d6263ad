"""Batches in pinned memory, which their owner refills when a step has returned."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import pykern
from pykern import schedules
from pykern.runtime.gpu.capture.refusals import CannotCapture
from pykern.runtime.replicas import Replicas
from tests.fake_cuda.fake import FakeCuda, Range
from tests.fake_cuda.host_gpus import HostGpus
from tests.runtime.models import CASES, Case
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step


def place_of(tensor: Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Loader:
    """A pinned batch: GPU 0 reads it when a step copies it, and the host fills it."""

    def __init__(self, fake: FakeCuda, case: Case, patch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.x = case.inputs.clone()
        self.gpus: list[HostGpus] = []
        # torch may keep the function, so it does not hold the GPUs.
        pinned = self.x
        patch.setattr(Tensor, "is_pinned", lambda tensor: tensor is pinned)
        patch.setattr(Replicas, "place", self.place)

    def place(self, inputs: Any, target: Any) -> Any:
        """Takes the place of a copy to the GPU on its caller's stream."""
        caller = self.gpus[0].current(0)
        # Bytes that the host has written are there.
        self.fake.order(self.gpus[0].host, caller)
        self.fake.kernel(caller, reads=[place_of(self.x)])
        return ((self.x.clone(),), {}), target

    def fill(self, value: Tensor) -> None:
        self.fake.kernel(self.gpus[0].host, writes=[place_of(self.x)])
        self.x.copy_(value)


@pytest.mark.parametrize("capture", [False, True, "step"])
def test_a_batch_may_be_refilled_when_its_step_returns(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    case = CASES["mlp"](16)
    plain = copy.deepcopy(case.layers)
    loader = Loader(gpus, case, monkeypatch)
    with case.pipeline(schedules.one_f_one_b(2, 4), "cuda", capture=capture) as pipe:
        driver: Any = pipe._executor.driver
        loader.gpus.append(driver.gpus)
        for _ in range(4):
            value = torch.randn_like(loader.x)
            loader.fill(value)
            stages = pipe.partition.stages
            expected = plain_step(plain, value, case.target, case.loss_fn, 4, stages)
            assert torch.equal(pipe.step(loader.x, target=case.target), expected)
            assert_same_state(pipe, plain)


def test_outputs_of_a_batch_that_is_refilled(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["mlp"](16)
    plain = copy.deepcopy(case.layers)
    loader = Loader(gpus, case, monkeypatch)
    with (
        pykern.Pipeline(case.layers, devices=["cuda:0", "cuda:1"], microbatches=4) as pipe,
        torch.no_grad(),
    ):
        driver: Any = pipe._executor.driver
        loader.gpus.append(driver.gpus)
        for _ in range(2):
            value = torch.randn_like(loader.x)
            loader.fill(value)
            output = pipe(loader.x)
            assert torch.equal(output, torch.cat([plain(part) for part in value.split(4)]))
            del output


def test_a_step_that_fails_has_read_its_batch(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["mlp"](16)
    loader = Loader(gpus, case, monkeypatch)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError

    with pykern.Pipeline(
        case.layers, devices=["cuda:0", "cuda:1"], microbatches=4, loss_fn=broken
    ) as pipe:
        driver: Any = pipe._executor.driver
        loader.gpus.append(driver.gpus)
        with pytest.raises(ArithmeticError):
            pipe.step(loader.x, target=case.target)
        loader.fill(torch.zeros_like(loader.x))


def test_a_step_that_cannot_be_captured_has_read_its_batch(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was issued after the copy of the batch, so nothing else has waited for it."""
    case = CASES["mlp"](16)
    case.layers[0].register_forward_hook(lambda *_: None)
    loader = Loader(gpus, case, monkeypatch)
    with case.pipeline(schedules.one_f_one_b(2, 4), "cuda", capture=True) as pipe:
        driver: Any = pipe._executor.driver
        loader.gpus.append(driver.gpus)
        pipe.step(loader.x, target=case.target)
        with pytest.raises(CannotCapture):
            pipe.step(loader.x, target=case.target)
        loader.fill(torch.zeros_like(loader.x))
