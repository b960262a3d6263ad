"""Layers compiled by torch.compile: the bits of the same compiled layers in a plain loop."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern import schedules
from pykern.plan import Kind
from tests.loop.loops import Block, assert_same, batch, mlp, pipeline, plain_loop_step
from tests.support.plain_step import plain_step


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch's compiler asks every input for its gradient, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def blocks(rate: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(Block(rate) for _ in range(4)))


class Counting:
    """The backend "aot_eager", counting how often compiled code is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            return compiled(*arguments)

        return call


def compiled(layers: nn.Sequential, backend: Any, *, in_place: bool) -> nn.Sequential:
    if not in_place:
        wrapped: list[Any] = [torch.compile(layer, backend=backend) for layer in layers]
        return nn.Sequential(*wrapped)
    for layer in layers:
        layer.compile(backend=backend)
    return layers


def check(schedule: str, in_place: bool, steps: tuple[int, ...], **options: Any) -> None:
    layers = blocks()
    plain = copy.deepcopy(layers)
    counting = Counting()
    ours = compiled(layers, counting, in_place=in_place)
    theirs = compiled(plain, "aot_eager", in_place=in_place)
    with pipeline(ours, schedule=schedule, **options) as pipe:
        assert list(pipe.state_dict()) == list(theirs.state_dict())
        recomputed = sum(action.kind is Kind.R for row in pipe.plan.rows for action in row)
        for rows in steps:
            x, y = batch(rows)
            before = counting.calls
            loss = pipe.step(x, target=y)
            layers_of_stage = 4 // pipe.plan.num_stages
            assert counting.calls - before == 4 * 3 + layers_of_stage * recomputed
            assert_same(pipe, theirs, (loss, plain_loop_step(theirs, x, y)))
        x, _ = batch(6)
        pipe.eval()
        theirs.eval()
        with torch.no_grad():
            expected = torch.cat([theirs(part) for part in x.split(2)])
        assert torch.equal(pipe(x), expected)


@pytest.mark.parametrize(
    ("schedule", "in_place", "options"),
    [("one_f_one_b", True, {}), ("zb_h1", False, {"recompute": "stage"})],
    ids=str,
)
def test_compiled_layers_train(schedule: str, in_place: bool, options: dict[str, Any]) -> None:
    check(schedule, in_place, (6, 6), **options)


@pytest.mark.nightly
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "interleaved"])
def test_compiled_layers_train_with_any_rows(
    schedule: str, recompute: str | None, in_place: bool
) -> None:
    check(schedule, in_place, (6, 6, 7), recompute=recompute)


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_compiled_dropout_draws_what_it_draws_after_the_seed_of_its_action(
    recompute: str | None,
) -> None:
    layers = blocks(0.5)
    plain = copy.deepcopy(layers)
    ours = compiled(layers, "aot_eager", in_place=True)
    theirs = compiled(plain, "aot_eager", in_place=True)
    with pipeline(ours, recompute=recompute) as pipe:
        for _ in range(2):
            x, y = batch(6)
            state = torch.get_rng_state()
            loss = pipe.step(x, target=y)
            behind = torch.get_rng_state()
            # The step takes one number of the caller's, which the reference looks at.
            torch.set_rng_state(state)
            expected = plain_step(theirs, x, y, F.mse_loss, 3, pipe.partition.stages)
            assert_same(pipe, theirs, (loss, expected))
            torch.empty((), dtype=torch.int64).random_()
            assert torch.equal(torch.get_rng_state(), behind)


def test_replicas_refuse_what_would_run_with_the_originals_parameters() -> None:
    layers = compiled(mlp(8), "eager", in_place=True)
    with pytest.raises(ValueError, match=r"has a _compiled_call_impl of its own"):
        pipeline(layers, schedule=schedules.chimera(2, 4), microbatches=4)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_inductor_trains(schedule: str) -> None:
    layers = blocks()
    plain = copy.deepcopy(layers)
    ours = compiled(layers, "inductor", in_place=True)
    theirs = compiled(plain, "inductor", in_place=True)
    with pipeline(ours, schedule=schedule) as pipe:
        for _ in range(2):
            x, y = batch(6)
            loss: Tensor = pipe.step(x, target=y)
            assert_same(pipe, theirs, (loss, plain_loop_step(theirs, x, y)))
