"""Random numbers: reproducible, the caller's generator moved by one draw at most."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pykern
from pykern import schedules
from pykern.runtime.random.eager import NoteOwn
from pykern.runtime.random.seed import action_seed
from tests.runtime.plans import split_backward


def model() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)]


def run(layers: list[nn.Module], num_devices: int, seed: int) -> tuple[Tensor, Tensor]:
    """A step's loss, and the next number from the caller's generator."""
    with pykern.Pipeline(
        layers, devices=f"cpu:{num_devices}", microbatches=4, loss_fn=F.mse_loss, balance="layers"
    ) as pipe:
        batch = torch.ones(8, 6), torch.zeros(8, 6)
        torch.manual_seed(seed)
        return pipe.step(batch[0], target=batch[1]), torch.rand(())


def test_the_seed_decides() -> None:
    layers = model()
    first, again, other = (run(layers, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_model_without_draws_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    assert torch.equal(run([nn.Linear(6, 6), nn.Linear(6, 6)], 2, 5)[1], expected)


def test_a_model_with_draws_takes_one_number_per_step() -> None:
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(())
    for num_devices in (1, 2, 4):
        assert torch.equal(run(model(), num_devices, 5)[1], expected)


def test_steps_and_microbatches_draw_different_numbers() -> None:
    masks: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            masks.append(F.dropout(torch.ones(64), 0.5))
            return x

    with pykern.Pipeline([Keep(), Keep()], devices="cpu:2", microbatches=4) as pipe:
        for _ in range(2):
            pipe(torch.ones(4, 6))
    assert len({tuple(mask.tolist()) for mask in masks}) == 16


@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("steps", [0, 1])
def test_inference_mode_draws_what_no_grad_draws(
    mode: Callable[[], AbstractContextManager[Any]], steps: int
) -> None:
    layers, x = model(), torch.ones(8, 6)

    def calls(kind: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
        with pykern.Pipeline(layers, devices="cpu:2", microbatches=4, loss_fn=F.mse_loss) as pipe:
            for _ in range(steps):
                pipe.step(x, target=x)
            torch.manual_seed(5)
            with kind(), mode():
                found = [pipe(x)]
            # The first call shows whether stages draw.
            with torch.no_grad():
                return [*found, pipe(x), torch.rand(())]

    pairs = zip(calls(torch.inference_mode), calls(torch.no_grad), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_draws_begin_and_end_with_train_mode() -> None:
    layers = [nn.Linear(6, 6), nn.Dropout(0.5)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        x = torch.ones(4, 6)
        for _ in range(2):
            pipe.eval()
            assert torch.equal(pipe(x), layers[0](x))
            pipe.train()
            torch.manual_seed(3)
            first = pipe(x)
            torch.manual_seed(3)
            assert torch.equal(pipe(x), first)
            assert not torch.equal(first, layers[0](x))


def test_draws_begin_when_a_layer_is_changed_or_replaced() -> None:
    block = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.0))
    dropout = block[0]
    assert isinstance(dropout, nn.Dropout)
    with pykern.Pipeline([nn.Identity(), block], devices="cpu:2", microbatches=2) as pipe:
        x = torch.ones(4, 6)

        def draws_from_its_own_state() -> bool:
            torch.manual_seed(3)
            torch.empty((), dtype=torch.int64).random_()
            expected = torch.rand(())
            torch.manual_seed(3)
            return not torch.equal(pipe(x), x) and torch.equal(torch.rand(()), expected)

        assert torch.equal(pipe(x), x)
        dropout.p = 0.5
        assert draws_from_its_own_state()
        dropout.p = 0.0
        assert torch.equal(pipe(x), x)
        block[1] = nn.Dropout(0.5)
        assert draws_from_its_own_state()


class Sometimes(nn.Module):
    """Draws in the calls that `pattern` says, and fails in those where it says None."""

    def __init__(self, pattern: list[bool | None]) -> None:
        super().__init__()
        self.pattern = pattern
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        draws = self.pattern.pop(0)
        if draws is None:
            raise ValueError("planted")
        if draws:
            self.drawn.append(float(torch.rand(())))
        return x


def test_what_drew_once_is_served_again() -> None:
    layers = [Sometimes([True, False, True, True]), Sometimes([True, False, True, True])]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=4) as pipe:
        torch.manual_seed(0)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        torch.manual_seed(0)
        pipe(torch.ones(4, 2))
    for stage, layer in enumerate(layers):
        expected = [
            float(torch.rand((), generator=torch.Generator().manual_seed(key)))
            for key in (action_seed(seed, stage, microbatch) for microbatch in (0, 2, 3))
        ]
        assert layer.drawn == expected


def test_an_action_that_failed_says_nothing_about_draws() -> None:
    layers = [Sometimes([None, True, True]), nn.Identity()]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        with pytest.raises(ValueError, match="planted"):
            pipe(torch.ones(2, 2))
        torch.manual_seed(0)
        pipe(torch.ones(2, 2))
        after = torch.rand(())
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.rand(()))


def test_a_loss_that_draws_is_part_of_the_last_stage() -> None:
    drawn: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        drawn.append(float(torch.rand(())))
        return F.mse_loss(output, target)

    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=4, loss_fn=loss) as pipe:
        # Which calls no loss, and says nothing about it.
        pipe(torch.ones(4, 2))
        for _ in range(2):
            torch.manual_seed(0)
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
            after = torch.rand(())
            torch.manual_seed(0)
            torch.empty((), dtype=torch.int64).random_()
            assert torch.equal(after, torch.rand(()))
    assert len(set(drawn)) == 4
    assert drawn[:4] == drawn[4:]


class Calls(nn.Module):
    """Calls something else in its forward."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def many_draws(x: Tensor) -> Tensor:
    """Draws with the generator as the one thing by name, beside others, never, and a given one."""
    x = F.dropout(x, 0.5) + torch.rand_like(x, dtype=x.dtype)
    x = torch.native_dropout(x, 0.5, True)[0] + F.rrelu(x, training=True)
    own = torch.Generator().manual_seed(3)
    return x + torch.rand(x.shape) + torch.zeros_like(x).normal_(generator=own)


def within_a_mode(x: Tensor) -> Tensor:
    """Draws within another interceptor, as a pipeline in a layer does."""
    with NoteOwn():
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("call", [many_draws, within_a_mode])
def test_every_step_draws_what_the_plain_model_draws_by_the_seeds(
    call: Callable[[Tensor], Tensor],
) -> None:
    """From the second step on, nobody watches what is drawn."""
    x = torch.randn(6, 4)
    with pykern.Pipeline([Calls(call), Calls(call)], devices="cpu:2", microbatches=3) as pipe:
        for number in range(4):
            torch.manual_seed(number)
            step = int(torch.empty((), dtype=torch.int64).random_())
            expected = []
            for microbatch, part in enumerate(x.split(2)):
                value = part
                for stage in range(2):
                    torch.manual_seed(action_seed(step, stage, microbatch))
                    value = call(value)
                expected.append(value)
            torch.manual_seed(number)
            assert torch.equal(pipe(x), torch.cat(expected))


def test_a_known_stage_that_draws_no_more_takes_no_number() -> None:
    drawn: list[bool | None] = [True, True, False, False, True, True]
    with pykern.Pipeline([Sometimes(drawn)], devices="cpu:1", microbatches=2) as pipe:
        moved = []
        for _ in range(3):
            before = torch.default_generator.get_state()
            pipe(torch.ones(2, 2))
            moved.append(not torch.equal(before, torch.default_generator.get_state()))
    assert moved == [True, False, True]


def test_what_others_draw_meanwhile_is_theirs() -> None:
    """A thread beside the workers that reads the default generator finds the caller's state."""
    states: list[bool] = []

    def look(x: Tensor) -> Tensor:
        before = torch.default_generator.get_state()
        y = F.dropout(x, 0.5)
        states.append(torch.equal(torch.default_generator.get_state(), before))
        return y

    with pykern.Pipeline([Calls(look), Calls(look)], devices="cpu:2", microbatches=4) as pipe:
        for _ in range(2):
            pipe(torch.ones(4, 6))
    # The first draw of a step takes the step's seed from the caller.
    assert len(states) == 16
    assert states.count(False) <= 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class Noisy(torch.autograd.Function):
    """The identity, whose backward draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + torch.rand(())


class NoisyWeight(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(F.linear(input, Noisy.apply(self.weight)), training=self.training)


@pytest.mark.parametrize(
    ("layers", "action"),
    [
        ([nn.Linear(6, 6), Checkpointed()], "1B0"),
        ([nn.Linear(6, 6), Checkpointed()], "1I0"),
        ([Checkpointed(), nn.Linear(6, 6)], "0W0"),
        ([nn.Linear(6, 6), NoisyWeight(6, 6)], "1W0"),
    ],
)
def test_draws_in_a_backward_are_refused_not_wrong(layers: list[nn.Module], action: str) -> None:
    plan = schedules.one_f_one_b(2, 2)
    if "B" not in action:
        plan = split_backward(plan)
    with pykern.Pipeline(layers, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        batch = torch.ones(4, 6), torch.zeros(4, 6)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"draws .* in a backward .{action}."):
                pipe.step(batch[0], target=batch[1])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("unfrozen", [0, 1])
def test_draws_in_a_backward_are_refused_also_when_it_comes_to_reach_further(
    split: bool, unfrozen: int
) -> None:
    layers = [nn.Linear(6, 6), nn.Sequential(Checkpointed(), nn.Linear(6, 6))]
    frozen = [layers[0], layers[1].get_submodule("0")]
    for layer in frozen:
        layer.requires_grad_(False)
    plan = schedules.one_f_one_b(2, 2)
    if split:
        plan = split_backward(plan)
    with pykern.Pipeline(layers, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        batch = torch.ones(4, 6), torch.zeros(4, 6)
        pipe.step(batch[0], target=batch[1])
        frozen[unfrozen].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"draws .* in a backward"):
            pipe.step(batch[0], target=batch[1])


def test_without_dropout_a_checkpoint_runs() -> None:
    layers = [nn.Linear(6, 6), Checkpointed()]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.eval()
        pipe.step(torch.ones(4, 6), target=torch.zeros(4, 6))


def test_seeds_do_not_collide() -> None:
    seeds = {
        action_seed(step, stage, microbatch)
        for step in (0, 1, -1, 2**63 - 1)
        for stage in range(64)
        for microbatch in range(64)
    }
    assert len(seeds) == 4 * 64 * 64
