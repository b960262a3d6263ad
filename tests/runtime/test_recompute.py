"""Recompute: with R, whatever the plan and the layers, every bit is as without it."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import pykern
from pykern import schedules
from pykern.kernels import levels as kernels
from pykern.plan import Kind, Plan
from pykern.runtime.loss import Losses
from pykern.runtime.random import StepSeed
from pykern.runtime.recompute import Level
from pykern.runtime.stage import Stage
from tests.runtime.models import CASES, Case
from tests.runtime.plans import recomputed, split_backward, two_replicas
from tests.runtime.reference import assert_same_state, plain_step

# Updates within a step, and slices, need an executor that is not there yet.
NOT_YET = {"pipedream", "pipedream_2bw", "seq1f1b"}
PLANS: dict[str, Callable[[int, int], Plan]] = {
    name: make for name, make in schedules.by_name.items() if name not in NOT_YET | {"forward_only"}
}
PLANS["split replicas"] = lambda p, m: split_backward(two_replicas(p, m))
MODELS = sorted(CASES)


def pairs() -> list[Any]:
    """Every plan, each with two models, so that all models and levels take part."""
    found = []
    for number, name in enumerate(sorted(PLANS)):
        for turn, level in enumerate(("layer", "stage")):
            model = MODELS[(number + turn * 3) % len(MODELS)]
            late = (number + turn) % 2 == 0
            found.append(pytest.param(name, model, level, late, id=f"{name}-{model}-{level}"))
    found += [
        pytest.param("zb_h1", model, level, False, id=f"zb_h1-{model}-{level}-early")
        for model in MODELS
        for level in ("layer", "stage")
    ]
    return found


@pytest.mark.parametrize(("name", "model", "level", "late"), pairs())
def test_every_bit_equals_the_plain_model(name: str, model: str, level: Any, late: bool) -> None:
    plan = PLANS[name](4, 8 if name == "dualpipe_v" else 4)
    num_replicas = plan.placement.num_replicas
    # Running statistics are refused where there are replicas.
    case = CASES["structured" if num_replicas > 1 and model == "cnn" else model](11)
    # The second step has empty microbatches.
    check_steps(case, recomputed(plan, late=late), level, [11, 3])


def check_steps(case: Case, plan: Plan, level: Any, batches: Sequence[int], **options: Any) -> None:
    """Steps of these numbers of rows; each adds to the gradients of those before."""
    plain = copy.deepcopy(case.layers)
    with pipeline(case, plan, recompute=level, **options) as pipe:
        for rows in batches:
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(
                plain,
                x.clone(),
                y,
                case.loss_fn,
                plan.num_microbatches,
                pipe.partition.stages,
                num_replicas=plan.placement.num_replicas,
            )
            assert torch.equal(pipe.step(x.clone(), target=y), expected)
            assert_same_state(pipe, plain)


def pipeline(case: Case, plan: Plan, **options: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        case.layers,
        devices=f"cpu:{plan.num_devices}",
        schedule=plan,
        loss_fn=case.loss_fn,
        **{"balance": "layers", **options},
    )


class Written(nn.Module):
    """Writes into what it is given, and does not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Tied(nn.Module):
    """A layer with the parameters of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.sin(), self.other.weight)


class Aside:
    """Where a layer leaves something for another."""

    value: Tensor


class Leaves(nn.Linear):
    def __init__(self, aside: Aside) -> None:
        super().__init__(6, 6)
        self.aside = [aside]

    def forward(self, x: Tensor) -> Tensor:
        self.aside[0].value = y = super().forward(x)
        return y.cos()


class Finds(nn.Linear):
    def __init__(self, aside: Aside) -> None:
        super().__init__(6, 6)
        self.aside = [aside]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.aside[0].value


class Average(nn.Module):
    """Keeps an average as another buffer each time, and uses it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Noise(nn.Module):
    """Draws from a generator of its own, and from the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.rand(x.shape, generator=self.generator)
        return F.dropout(x * own, 0.3) + torch.rand_like(x)

    def __deepcopy__(self, _: Any) -> "Noise":
        return Noise()


class Modes(nn.Linear):
    """Switches autocast and gradients within itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = super().forward(x)
        with torch.no_grad():
            scale = x.abs().mean()
        assert torch.is_grad_enabled()
        return y.float() * scale + x.tanh()


class Derivative(nn.Linear):
    """Uses a transform that refuses hooks of saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        sines = torch.func.vmap(torch.func.grad(torch.sin))(x.detach().flatten())
        return super().forward(x) * sines.view_as(x)


class Passes(nn.Module):
    """Passes its parameter on with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Uses(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] @ parts[1].sin()


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def tied() -> list[nn.Module]:
    first = linear()
    return [first, nn.Tanh(), Tied(first), nn.Dropout(0.3), linear()]


def aside() -> list[nn.Module]:
    shared = Aside()
    return [linear(), Leaves(shared), nn.Tanh(), Finds(shared), linear()]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "writes": lambda: [linear(), Written(), nn.Identity(), nn.ReLU(inplace=True), linear()],
    "tied": tied,
    "aside": aside,
    "spectral norm": lambda: [spectral_norm(linear()), nn.Tanh(), spectral_norm(linear())],
    "average": lambda: [linear(), Average(), linear(), nn.BatchNorm1d(6)],
    "noise": lambda: [linear(), Noise(), linear(), nn.Dropout(0.5), Noise(), linear()],
    "modes": lambda: [Modes(6, 6), Modes(6, 6), linear()],
    "derivative": lambda: [linear(), Derivative(6, 6), linear()],
    "passes": lambda: [linear(), Passes(), Uses(), Passes(), Uses()],
}


@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_hard_to_repeat(name: str, level: Any) -> None:
    layers = [*LAYERS[name](), linear(), nn.Dropout(0.2), linear()]
    case = Case(nn.Sequential(*layers), torch.randn(9, 6), torch.randn(9, 6), F.mse_loss)
    plan = recomputed(split_backward(schedules.one_f_one_b(2, 4)), late=name in ("tied", "modes"))
    check_steps(case, plan, level, [9, 9], balance=[len(layers) - 3, 3])


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_layer_may_write_into_the_batch(level: Any) -> None:
    # What a matrix product rounds to depends on where its factors lie: rows of 64 bytes.
    layers = nn.Sequential(Written(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    case = Case(layers, torch.randn(8, 16), torch.randn(8, 16), F.mse_loss)
    check_steps(case, recomputed(schedules.one_f_one_b(1, 4)), level, [8, 8])


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast(
        "cpu", dtype=torch.bfloat16, cache_enabled=False
    ),
    "hooks": save_on_cpu,
    "no hooks": lambda: disable_saved_tensors_hooks("there are none here"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_modes_of_the_caller(caller: str) -> None:
    layers = nn.Sequential(*tied(), *tied())
    case = Case(layers, torch.randn(9, 6), torch.randn(9, 6), F.mse_loss)
    plan = recomputed(schedules.zb_h1(2, 4))
    with CALLERS[caller]():
        check_steps(case, plan, "layer", [9, 9], balance=[5, 5])


class Counted(nn.Sequential):
    """Counts its calls by what it is given, and may checkpoint itself."""

    def __init__(self, checkpoint: bool | None = None) -> None:
        super().__init__(linear(), nn.Tanh(), linear())
        self.calls: Counter[bytes] = Counter()
        self.reentrant = checkpoint

    def inner(self, x: Tensor) -> Tensor:
        self.calls[x.detach().numpy().tobytes()] += 1
        y: Tensor = super().forward(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_no_layer_is_called_more_than_twice(level: Any, reentrant: bool, split: bool) -> None:
    kinds = [None, reentrant, None, None, reentrant, reentrant]
    counted = [Counted(kind) for kind in kinds]
    layers = nn.Sequential(*counted)
    case = Case(layers, torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    plan = schedules.gpipe(2, 4)
    plan = recomputed(split_backward(plan) if split else plan)
    check_steps(case, plan, level, [4], balance=[4, 2])
    for layer in counted:
        # The first microbatch is watched, and keeps the graph of a stage with checkpoints.
        first = 1 if layer.reentrant is None else 2
        assert sorted(layer.calls.values()) == [first, 2, 2, 2]


class Block(nn.Module):
    """Remembers its activations, and in backward how many of all blocks there are."""

    def __init__(self, blocks: list["Block"]) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()
        self.inner: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.outputs: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.blocks = [blocks]
        self.passed: list[list[int]] = []
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.inner.add(hidden)
        hidden.register_hook(
            lambda _: self.passed.append([len(block.inner) for block in self.blocks[0]])
        )
        y: Tensor = self.down(hidden)
        self.outputs.add(y)
        return y


@pytest.mark.parametrize("kinds", ["B", "IW"])
@pytest.mark.parametrize("level", ["layer", "stage"])
def test_only_inputs_are_kept_and_graphs_go_one_by_one(level: Level, kinds: str) -> None:
    blocks: list[Block] = []
    layers = [Block(blocks) for _ in range(3)]
    stage = Stage(0, layers)
    data = torch.randn(3, 4, 6)
    losses = Losses(F.mse_loss, list(torch.randn(3, 4, 6)), [1.0] * 3)
    stage.begin(3, StepSeed(), losses, [level] * 3)
    stage.arguments = [(x.requires_grad_(),) for x in data.unbind()]
    stage.leaves = [arguments for arguments in stage.arguments if arguments]
    for microbatch in range(3):
        stage.forward(microbatch)
        assert [len(block.inner) for block in blocks] == [0, 0, 0]
        # Those that are handed over are others, of the same memory.
        assert [len(block.outputs) for block in blocks] == [0, 0, 0]
    kept = storages_behind(stage._recompute)
    assert len(kept) == (1 + 2 * 3 if level == "layer" else 1)
    stage.recompute(0)
    assert [len(block.inner) for block in blocks] == [1, 1, 1]
    backward = stage.backward if kinds == "B" else stage.input_gradients
    backward(0)
    # What W multiplies with, I leaves to it.
    left = [[1, 1, 1]] * 3 if kinds == "IW" else [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert [block.passed for block in blocks] == [[passed] for passed in left]
    stage.weight_gradients(0)
    assert [len(block.inner) for block in blocks] == [0, 0, 0]
    stage.end()
    assert storages_behind(stage._recompute) == set()


def storages_behind(thing: object) -> set[int]:
    """Where the tensors are that can be reached from an object by the runtime's own classes."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [thing]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.add(one.untyped_storage().data_ptr())
        elif isinstance(one, dict | list | tuple):
            stack += one.values() if isinstance(one, dict) else one
        elif type(one).__module__.startswith("pykern.runtime"):
            names = getattr(type(one), "__slots__", ()) or vars(one)
            stack += [getattr(one, name) for name in names]
    return found


WRONG: dict[str, tuple[Any, str]] = {
    "level": ("layers", "recompute for stage 0 is one of 'none', .* got 'layers'"),
    "type": ([3, None], "recompute for stage 0 is one of .* got 3"),
    "stages": (["layer"], "recompute has 1 entries, but the plan has 2 stages"),
    "microbatches": ([["layer"], None], "1 entries for stage 0, but the plan has 3 microbatches"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_level_is_refused(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pipeline(CASES["mlp"](3), schedules.gpipe(2, 3), recompute=value)


def test_without_a_backward_nothing_can_be_recomputed() -> None:
    with pytest.raises(ValueError, match="recompute='layer', but the plan has no backward"):
        pipeline(CASES["mlp"](3), schedules.forward_only(2, 3), recompute="layer")


def test_levels_of_stages_and_microbatches() -> None:
    levels: Any = ["layer", [None, "stage", "none", "ops", "ops+stash"]]
    with pipeline(CASES["mlp"](5), schedules.gpipe(2, 5), recompute=levels) as pipe:
        plan = pipe.plan
    recomputes = {str(a) for row in plan.rows for a in row if a.kind is Kind.R}
    assert recomputes == {*(f"0R{m}" for m in range(5)), "1R1"}
    check_steps(CASES["mlp"](5), schedules.gpipe(2, 5), levels, [5, 5])


def test_a_plan_with_recomputes_is_run_as_it_is() -> None:
    plan = recomputed(schedules.gpipe(2, 3))
    for level in (None, "layer", "ops", [None, "layer"]):
        check_steps(CASES["gpt"](3), plan, level, [3])
        with pipeline(CASES["mlp"](3), plan, recompute=level) as pipe:
            assert pipe.plan == plan


def test_kernels_are_told_their_level() -> None:
    found: list[str] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(kernels.level())
            return super().forward(x)

    layers = nn.Sequential(Asks(6, 6), linear())
    case = Case(layers, torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    levels: Any = [["none", "ops+stash", None, "stage"], None]
    check_steps(case, schedules.gpipe(2, 4), levels, [4])
    # The plain model runs first.
    assert found[4:] == ["none", "ops+stash", "ops", "ops", "ops"]


def test_a_forward_on_its_own_recomputes_nothing() -> None:
    layer = Counted()
    case = Case(nn.Sequential(layer), torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    with pipeline(case, schedules.gpipe(1, 2), recompute="layer") as pipe:
        assert not pipe(case.inputs).requires_grad
    assert sorted(layer.calls.values()) == [1, 1]


def test_layers_that_do_something_else_the_second_time_are_refused() -> None:
    class Grows(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x).repeat(1, 1 + self.count // 3)

    layers = nn.Sequential(Grows(6, 6), nn.Tanh())
    case = Case(layers, torch.randn(2, 6), torch.randn(2, 6), lambda y, _: y.sum())
    with (
        pipeline(case, recomputed(schedules.gpipe(1, 2)), recompute="layer") as pipe,
        pytest.raises(RuntimeError, match=r"returned \[\(\(1, 12\), torch.float32\)\].* before"),
    ):
        pipe.step(case.inputs, target=case.target)
