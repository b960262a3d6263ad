"""Random numbers on several devices: each has a generator, and each action a state of each.

On a machine without a GPU, generators of the CPU stand in for those of two GPUs, and an operation
that draws from the one of its device for theirs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.plan import Kind
from pykern.runtime.random import eager
from pykern.runtime.random.draws import Draws
from pykern.runtime.random.eager import OwnState
from pykern.runtime.random.seed import StepSeed, action_seed, default_generator

META = torch.device("meta")


class Operation:
    """An operation of a GPU, with torch's tag for those that may draw."""

    tags = (torch.Tag.nondeterministic_seeded,)

    def __init__(self, draws: bool = True) -> None:
        self.draws = draws

    def __call__(self, *tensors: Tensor, device: torch.device) -> float:
        generator = default_generator(device)
        return float(torch.rand((), generator=generator)) if self.draws else 0.0


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    stand_ins = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(stand_ins))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return stand_ins


@pytest.fixture
def seed() -> StepSeed:
    torch.manual_seed(7)
    return StepSeed()


def started(seed: StepSeed, stage: int = 3) -> Draws:
    draws = Draws(stage)
    draws.begin(seed, None)
    return draws


def next_numbers(generators: list[torch.Generator]) -> list[float]:
    everyone = [torch.default_generator, *generators]
    return [float(torch.rand((), generator=generator)) for generator in everyone]


def test_devices_and_their_generators(generators: list[torch.Generator]) -> None:
    assert default_generator(torch.device("cuda", 0)) is generators[0]
    assert default_generator(torch.device("cuda", 1)) is generators[1]
    assert default_generator(torch.device("cuda")) is generators[1]
    assert default_generator(torch.device("cpu")) is torch.default_generator


def test_an_action_draws_on_each_device_as_if_it_had_been_seeded(
    generators: list[torch.Generator], seed: StepSeed
) -> None:
    draw: Any = Operation()
    mode = started(seed).forward(5)
    assert isinstance(mode, OwnState)
    drawn: list[float] = []
    for index in (0, 1, 0):
        device = torch.device("cuda", index)
        drawn += [mode.draw(draw, (), {"device": device})]
        with mode:
            drawn += [float(torch.rand(()))]
    of = [torch.Generator().manual_seed(action_seed(seed.value(), 3, 5)) for _ in range(3)]
    order = [of[0], of[2], of[1], of[2], of[0], of[2]]
    assert drawn == [float(torch.rand((), generator=generator)) for generator in order]


def test_callers_generators_are_where_they_were(
    generators: list[torch.Generator], seed: StepSeed
) -> None:
    states = [generator.get_state() for generator in generators]
    torch.empty((), dtype=torch.int64).random_()
    expected = next_numbers(generators)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    torch.manual_seed(7)
    operation: Any = Operation()
    for microbatch in range(2):
        mode = started(seed).forward(microbatch)
        assert isinstance(mode, OwnState)
        for index in range(2):
            device = torch.device("cuda", index)
            mode.draw(operation, (), {"device": device})
    assert next_numbers(generators) == expected


def test_what_may_draw_and_does_not_leaves_everything_alone(
    generators: list[torch.Generator], seed: StepSeed
) -> None:
    """As attention without dropout does on a GPU."""
    attend: Any = Operation(draws=False)
    draws = started(seed)
    before = [g.get_state() for g in (torch.default_generator, *generators)]
    mode = draws.forward(0)
    assert isinstance(mode, OwnState)
    mode.draw(attend, (), {"device": torch.device("cuda", 0)})
    with mode:
        pass
    after = [g.get_state() for g in (torch.default_generator, *generators)]
    assert all(map(torch.equal, before, after))
    assert not draws.possible


def test_a_backward_may_repeat_what_does_not_draw(
    generators: list[torch.Generator], seed: StepSeed
) -> None:
    kwargs = {"device": torch.device("cuda", 0)}
    before = generators[0].get_state()
    mode: Any = started(seed).backward(Kind.B, 0)
    assert mode.draw(Operation(draws=False), (), kwargs) == 0.0
    with pytest.raises(RuntimeError, match=r"draws random numbers in a backward \(3B0\)"):
        mode.draw(Operation(), (), kwargs)
    assert torch.equal(before, generators[0].get_state())


def test_a_generator_of_the_users_in_a_backward_is_refused(seed: StepSeed) -> None:
    mode: Any = started(seed).backward(Kind.B, 0)
    own = torch.Generator().manual_seed(0)
    with mode, pytest.raises(RuntimeError, match="draws random numbers in a backward"):
        torch.rand((), generator=own)
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(2, device=META),
        lambda x: torch.rand_like(torch.ones(2), device=META),
        lambda x: torch.randperm(4, device=META),
        lambda x: torch.normal(0.0, 1.0, (2,), device=META),
        F.dropout,
        lambda x: x.normal_(),
        torch.bernoulli,
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_the_device_of_an_operation_is_found(
    monkeypatch: pytest.MonkeyPatch, seed: StepSeed, draw: Callable[[Tensor], object]
) -> None:
    asked: list[torch.device] = []

    def remember(device: torch.device) -> torch.Generator:
        asked.append(device)
        return torch.default_generator

    monkeypatch.setattr(eager, "default_generator", remember)
    x = torch.ones(2, 2, device=META)
    with started(seed).forward(0):
        draw(x)
    assert set(asked) == {META}
