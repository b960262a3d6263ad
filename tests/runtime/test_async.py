"""PipeDream and PipeDream-2BW: weights, optimizer state and losses equal the rules', to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.models.gpt import gpt, next_token_loss
from pykern.plan import Action, Kind, Plan, with_updates
from pykern.plan.parts import Parts
from pykern.runtime.asynchronous.executor import AsyncExecutor
from pykern.runtime.asynchronous.versions import Versions
from pykern.schedules import pipedream, pipedream_2bw, zb_h1
from tests.diagonal import diagonal
from tests.runtime import update_rules
from tests.runtime.async_runs import OPTIMIZERS, RULES, assert_same, pipeline, rules_for


def chain(num_stages: int, width: int = 6) -> nn.Sequential:
    """As many stages; each has buffers that its forwards write."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
            for _ in range(num_stages)
        )
    )


def mean_of(losses: list[Tensor], rows: list[int]) -> Tensor:
    first, *others = (x * (n / sum(rows)) for x, n in zip(losses, rows, strict=True))
    return sum(others, first)


SIZES = [(1, 2), (2, 2), (2, 5), (3, 3), (3, 6), (4, 4), (4, 8), (5, 7)]


@pytest.mark.parametrize(("sizes", "optimizer"), diagonal(SIZES, OPTIMIZERS))
@pytest.mark.parametrize("name", RULES)
def test_weights_and_losses_are_those_of_the_rule(
    sizes: tuple[int, int], optimizer: str, name: str
) -> None:
    num_stages, microbatches = sizes
    group = 1 if name == "pipedream" else microbatches
    options = {} if name == "pipedream" else {"group": group}
    layers, make = chain(num_stages), OPTIMIZERS[optimizer]
    rules = rules_for(layers, name, group, make)
    rows, found = [2] * microbatches, []
    with pipeline(layers, name, microbatches, make, **options) as pipe:
        for num_steps in (5, 1, 2):
            # Each time with an empty pipeline, in which the rule starts anew.
            for _ in range(num_steps):
                x, y = torch.randn(2, 2 * microbatches, 6)
                rules.batch(x, y, rows)
                found.append(pipe.step(x, target=y))
            last = pipe.flush()
            assert_same(pipe, rules)
            assert pipe.flush() is None
            _assert_losses(found if last is None else [*found, last], rules.losses, microbatches)
            rules.losses, found = [], []
            rules.start()


def _assert_losses(found: list[Tensor], losses: list[Tensor], microbatches: int) -> None:
    """Each is the mean of as many as came first of what is left, in order."""
    left = list(losses)
    for number, loss in enumerate(found):
        is_whole = 0 < number < len(found) - 1
        counts = [microbatches] if is_whole else range(1, min(microbatches, len(left)) + 1)
        fitting = [n for n in counts if torch.equal(loss, mean_of(left[:n], [2] * n))]
        assert fitting, f"loss {number} is of no microbatches in their order"
        del left[: fitting[-1]]
    assert left == []


@pytest.mark.parametrize(("microbatches", "group"), [(6, 3), (8, 4), (9, 3)])
def test_a_batch_may_have_several_groups(microbatches: int, group: int) -> None:
    layers, make = chain(3), OPTIMIZERS["AdamW"]
    rules = rules_for(layers, "pipedream_2bw", group, make)
    with pipeline(layers, "pipedream_2bw", microbatches, make, group=group) as pipe:
        for _ in range(5):
            x, y = torch.randn(2, 3 * microbatches, 6)
            rules.batch(x, y, [3] * microbatches)
            pipe.step(x, target=y)
        pipe.flush()
        assert_same(pipe, rules)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("batches", [(11, 9, 4, 7, 1, 13), (1, 1, 2, 1)])
def test_updates_are_means_over_their_own_rows(name: str, batches: tuple[int, ...]) -> None:
    """Batches of other sizes in each step, microbatches and whole updates without any rows."""
    microbatches, group = 6, 1 if name == "pipedream" else 3
    options = {} if name == "pipedream" else {"group": group}
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    rules = rules_for(layers, name, group, OPTIMIZERS["SGD"])
    with pipeline(layers, name, microbatches, OPTIMIZERS["SGD"], **options) as pipe:
        for size in batches:
            x, y = torch.randn(2, size, 4)
            rules.batch(x, y, [len(range(i, size, microbatches)) for i in range(microbatches)])
            pipe.step(x, target=y)
        pipe.flush()
        assert_same(pipe, rules)


@pytest.mark.parametrize("name", RULES)
def test_random_numbers_are_those_of_the_batch(name: str) -> None:
    """Keyed by batch, stage and microbatch, whichever step a forward runs in."""
    microbatches = 4
    group = 1 if name == "pipedream" else 4
    stages = (nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4)) for _ in range(4))
    layers = nn.Sequential(*stages)
    rules = rules_for(layers, name, group, OPTIMIZERS["SGD"])
    with pipeline(layers, name, microbatches, OPTIMIZERS["SGD"]) as pipe:
        for number in range(6):
            x, y = torch.randn(2, 8, 5)
            torch.manual_seed(number)
            seed = int(torch.empty((), dtype=torch.int64).random_())
            after = torch.rand(3)
            rules.batch(x, y, [2] * microbatches, seed)
            torch.manual_seed(number)
            pipe.step(x, target=y)
            assert torch.equal(torch.rand(3), after)
        pipe.flush()
        assert_same(pipe, rules)


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    layers = nn.Sequential(*(nn.Sequential(nn.Flatten(), Plain()) for _ in range(3)))
    x = torch.ones(6, 4)
    with pipeline(layers, "pipedream", 3, OPTIMIZERS["SGD"]) as pipe:
        for _ in range(3):
            pipe.step(x, target=x)
        pipe.flush()
    assert torch.equal(torch.get_rng_state(), before)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def num_held(versions: Versions) -> int:
    """The number of weight versions held."""
    return len({versions._newest, *(group.version for group in versions._in_flight.values())})


class Counts:
    """Looks at every stage around each of its actions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[int, int] = {}
        for name in ("forward", "backward", "update"):
            original = getattr(Versions, name)

            def looking(versions: Versions, *args: Any, original: Any = original) -> None:
                original(versions, *args)
                index = versions.stage.index
                storages = {
                    copied.untyped_storage().data_ptr()
                    for group in versions._in_flight.values()
                    for parameter, copied in group.pairs
                    if parameter.dim() == 2
                }
                weights = (p for layer in versions.stage.originals for p in layer.parameters())
                storages |= {p.untyped_storage().data_ptr() for p in weights if p.dim() == 2}
                assert len(storages) == num_held(versions)
                self.most[index] = max(self.most.get(index, 0), len(storages))

            monkeypatch.setattr(Versions, name, looking)


@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, 1), (2, 4), (3, 3), (4, 8), (5, 5)])
@pytest.mark.parametrize("name", RULES)
def test_as_many_versions_are_held_as_the_plan_says(
    num_stages: int, microbatches: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each in one storage: the newest is shared with who has read it."""
    counts = Counts(monkeypatch)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_stages)))
    with pipeline(layers, name, microbatches, OPTIMIZERS["SGD"]) as pipe:
        for _ in range(5):
            x, y = torch.randn(2, microbatches, 4)
            pipe.step(x, target=y)
        pipe.flush()
        assert isinstance(pipe._executor, AsyncExecutor)
        assert [num_held(versions) for versions in pipe._executor.versions] == [1] * num_stages
    make = pipedream if name == "pipedream" else pipedream_2bw
    parts = Parts(lambda count: make(num_stages, count), microbatches)
    assert [counts.most[stage] for stage in range(num_stages)] == parts.versions
    if name == "pipedream":
        assert parts.versions == [num_stages - stage for stage in range(num_stages)]
    else:
        assert parts.versions == [min(2, num_stages - stage) for stage in range(num_stages)]


def split(num_devices: int, num_microbatches: int) -> Plan:
    return with_updates(zb_h1(num_devices, num_microbatches), group=1, delay=0)


def test_a_schedule_of_ones_own_with_split_backwards() -> None:
    """Its late W have forwards read older weights than PipeDream's: as the plan's order says."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    rules = rules_for(layers, "pipedream", 1, OPTIMIZERS["SGD"])
    rows = split(2, 16).rows
    rules.reads = lambda group, stage, _: sum(
        action.kind is Kind.U
        for action in rows[stage][: rows[stage].index(forward_of(stage, group))]
    )
    assert rules.reads(3, 1, 2) < update_rules.pipedream(3, 1, 2)
    with pipeline(layers, split, 4, OPTIMIZERS["SGD"]) as pipe:
        for _ in range(4):
            x, y = torch.randn(2, 8, 4)
            rules.batch(x, y, [2] * 4)
            pipe.step(x, target=y)
        pipe.flush()
        assert_same(pipe, rules)


def forward_of(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *RULES])
def test_a_small_gpt_converges(name: str | None) -> None:
    """To the loss of a text that repeats itself; so does the synchronous one, as a yardstick."""
    tokens = torch.arange(9).repeat(20)[: 8 * 17].reshape(8, 17)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    layers = gpt(vocab=9, layers=2, width=16, heads=2, context=16)
    arguments: dict[str, Any] = {"loss_fn": next_token_loss, "microbatches": 4}

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.5)

    if name is None:
        with pykern.Pipeline(layers, devices="cpu:4", **arguments) as pipe:
            optimizer = make(pipe.parameters())
            losses = []
            for _ in range(40):
                losses.append(pipe.step(x, target=y))
                optimizer.step()
                optimizer.zero_grad()
    else:
        with pykern.AsyncPipeline(
            layers, devices="cpu:4", schedule=name, optimizer=make, **arguments
        ) as pipe:
            losses = [pipe.step(x, target=y) for _ in range(40)]
            pipe.flush()
    assert losses[0] > 2.0
    assert losses[-1] < 0.5, float(losses[-1])
