"""Features of a pipeline: their order, what they see, and that none hides another."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.pipeline.build import Design, MakeFeature, design
from pykern.pipeline.designer import designing
from pykern.pipeline.request import Request
from pykern.plan import Kind
from pykern.runtime.features.feature import Feature, TrainingStep
from pykern.runtime.stage.stage import Run, Stage

LOG: list[str] = []


class Noting(Feature):
    """Writes down what it is called for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        return partial(self._noted, call) if kind is Kind.F and stage.index == 0 else call

    def _noted(self, call: Run, microbatch: int) -> None:
        LOG.append(f"{self.name} F{microbatch}")
        call(microbatch)

    @contextmanager
    def step(self, scaler: object) -> Iterator[None]:
        LOG.append(f"{self.name} enters")
        try:
            yield
        except BaseException as error:
            LOG.append(f"{self.name} sees {type(error).__name__}")
            raise
        LOG.append(f"{self.name} leaves")

    def begin(self, step: TrainingStep) -> None:
        LOG.append(f"{self.name} begins {sum(step.rows)}")

    def finish(self, loss: Tensor) -> Tensor:
        LOG.append(f"{self.name} finishes")
        return loss + 1

    def close(self) -> None:
        LOG.append(f"{self.name} closes")


def designed(*more: MakeFeature) -> AbstractContextManager[None]:
    """Within it, pipelines have these further features."""

    def with_more(asked: Request) -> Design:
        return replace(design(asked), more=more)

    return designing(with_more)


@pytest.fixture
def pipe() -> Iterator[pykern.Pipeline]:
    """A pipeline with two more features, each added by one line."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    LOG.clear()
    with designed(lambda *_: Noting("a"), lambda *_: Noting("b")):
        pipe = pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss)
    with pipe:
        yield pipe


def test_features_have_an_order_and_none_drops_an_earlier_one(pipe: pykern.Pipeline) -> None:
    x = torch.randn(4, 2)
    plain = F.mse_loss(nn.Sequential(*pipe.children())(x), x)
    loss = pipe.step(x, target=x)
    torch.testing.assert_close(loss, plain.detach() + 2)
    order = "a enters, b enters, a begins 4, b begins 4, b F0, a F0, b F1, a F1, "
    assert ", ".join(LOG) == order + "b finishes, a finishes, b leaves, a leaves"
    LOG.clear()
    pipe.close()
    assert LOG == ["b closes", "a closes"]


def test_features_see_what_is_raised_in_a_step(pipe: pykern.Pipeline) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 2))
    assert [line for line in LOG if "sees" in line] == [
        "b sees RuntimeError",
        "a sees RuntimeError",
    ]
    assert not any("finishes" in line for line in LOG)


def test_forwards_alone_are_wrapped_but_are_not_steps(pipe: pykern.Pipeline) -> None:
    pipe(torch.randn(4, 2))
    assert LOG == ["b F0", "a F0", "b F1", "a F1"]


def test_a_designer_is_in_force_within_its_block() -> None:
    asked: list[Request] = []

    def noted(request: Request) -> Design:
        asked.append(request)
        raise KeyError("mine")

    layers = [nn.Linear(2, 2)]
    with pytest.raises(KeyError, match="mine"), designed(), designing(noted):
        pykern.Pipeline(layers, devices="cpu:1", microbatches=1)
    pykern.Pipeline(layers, devices="cpu:1", microbatches=1).close()
    assert [request.devices for request in asked] == ["cpu:1"]


def test_a_pipeline_that_cannot_be_made_closes_its_features() -> None:
    class Fails(Feature):
        def attach(self, made: object) -> None:
            raise KeyError("mine")

    LOG.clear()
    more = designed(lambda *_: Noting("a"), lambda *_: Fails())
    with pytest.raises(KeyError, match="mine"), more:
        pykern.Pipeline([nn.Linear(2, 2)], devices="cpu:1", microbatches=1)
    assert LOG == ["a closes"]
