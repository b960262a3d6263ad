"""Calls, and live tensors, between an F and its R and B."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pykern import schedules
from pykern.runtime.loss import Losses
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.recompute.recompute import Level
from pykern.runtime.stage.stage import Stage
from tests.runtime.hard_layers import Unwraps, Wraps, linear
from tests.runtime.models import Case
from tests.runtime.plans import recomputed, split_backward, two_replicas
from tests.runtime.recomputing import check_steps
from tests.support.pipelines import planned


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


def test_a_checkpoint_with_dropout_is_refused_as_without_recompute() -> None:
    checkpointed = Counted(False)
    checkpointed.append(nn.Dropout(0.5))
    layers = nn.Sequential(linear(), checkpointed)
    case = Case(layers, torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    with (
        case.pipeline(recomputed(schedules.gpipe(1, 2)), recompute="layer") as pipe,
        pytest.raises(RuntimeError, match="draws random numbers in a backward"),
    ):
        pipe.step(case.inputs, target=case.target)


def test_hooks_of_the_caller_are_no_checkpoints() -> None:
    """They see what R saves, and nothing that F lets go of."""
    layer = Counted()
    case = Case(nn.Sequential(layer), torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    packed: list[Tensor] = []
    plan = recomputed(schedules.gpipe(1, 2))

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with (
        case.pipeline(plan, recompute="layer") as pipe,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        pipe.step(case.inputs, target=case.target)
    assert sorted(layer.calls.values()) == [2, 2]
    # The batch, a tanh, both factors of the second product and of the loss.
    assert len(packed) == 2 * (1 + 1 + 2 + 2)


class Block(nn.Module):
    """Remembers its activations, and in backward how many of all blocks there are."""

    def __init__(self, blocks: list["Block"]) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()
        self.inner: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.outputs: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.blocks = [blocks]
        self.passed: list[list[int]] = []
        # In each forward, how many activations there are of all blocks.
        self.found: list[list[int]] = []
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.found.append([len(block.inner) for block in self.blocks[0]])
        hidden = torch.tanh(self.up(x))
        self.inner.add(hidden)
        hidden.register_hook(
            lambda _: self.passed.append([len(block.inner) for block in self.blocks[0]])
        )
        y: Tensor = self.down(hidden)
        self.outputs.add(y)
        return y


# For each block, how many activations of each there are when its own gradient comes: at level
# `layer` those in front are not made yet. I leaves to W the factors of W's products.
LEFT = {
    ("stage", "B"): [[0, 0, 0], [1, 0, 0], [1, 1, 0]],
    ("stage", "IW"): [[1, 1, 1]] * 3,
    ("layer", "B"): [[0, 0, 0]] * 3,
    ("layer", "IW"): [[1, 1, 1], [0, 1, 1], [0, 0, 1]],
}


@pytest.mark.parametrize("kinds", ["B", "IW"])
@pytest.mark.parametrize("level", ["layer", "stage"])
def test_only_inputs_are_kept_and_graphs_go_one_by_one(level: Level, kinds: str) -> None:
    blocks: list[Block] = []
    layers = [Block(blocks) for _ in range(3)]
    stage = Stage(0, layers)
    data = torch.randn(3, 4, 6)
    in_loss: list[list[int]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        in_loss.append([len(block.inner) for block in blocks])
        return F.mse_loss(output, target)

    losses = Losses(loss_fn, list(torch.randn(3, 4, 6)), [1.0] * 3)
    stage.begin(3, StepSeed(), losses, [level] * 3)
    stage.arguments = [(x.requires_grad_(),) for x in data.unbind()]
    stage.leaves = [arguments for arguments in stage.arguments if arguments]
    for microbatch in range(3):
        stage.forward(microbatch)
        assert [len(block.inner) for block in blocks] == [0, 0, 0]
        # Those that are handed over are others, of the same memory.
        assert [len(block.outputs) for block in blocks] == [0, 0, 0]
    # The first is watched, in one graph. Later ones are cut also in front of the loss.
    assert in_loss == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    # So it is between the blocks of a forward.
    assert blocks[-1].found == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    # R releases what it alone holds.
    assert stage.arguments == [None] * 3
    kept = storages_behind(stage.recomputed.cells)
    assert len(kept) == (1 + 2 * 3 if level == "layer" else 1)
    stage.recompute(0)
    assert [len(block.inner) for block in blocks] == ([0, 0, 1] if level == "layer" else [1, 1, 1])
    backward = stage.backward if kinds == "B" else stage.input_gradients
    backward(0)
    assert [block.passed for block in blocks] == [[passed] for passed in LEFT[level, kinds]]
    stage.weight_gradients(0)
    assert [len(block.inner) for block in blocks] == [0, 0, 0]
    stage.end()
    assert storages_behind(stage.recomputed.cells) == set()


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


def test_a_forward_on_its_own_recomputes_nothing() -> None:
    layer = Counted()
    case = Case(nn.Sequential(layer), torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    with case.pipeline(schedules.gpipe(1, 2), recompute="layer") as pipe, torch.no_grad():
        pipe(case.inputs)
    assert sorted(layer.calls.values()) == [1, 1]


# A step calls a layer four times. After two steps, R calls the layers of a stage in one go.
@pytest.mark.parametrize(("level", "last"), [("layer", 2), ("stage", 2), ("stage", 10)])
def test_layers_that_do_something_else_the_second_time_are_refused(level: Level, last: int) -> None:
    # Not a number of the layer, after whose change layers are watched anew.
    calls: list[Tensor] = []

    class Grows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x).repeat(1, 1 + (len(calls) > last))

    layers = nn.Sequential(Grows(6, 6), nn.Tanh(), nn.Tanh())
    plan, x = recomputed(schedules.gpipe(2, 2)), torch.randn(2, 6)
    told = r"returned \[\(\(1, 12\), torch.float32\)\].* before"
    with planned(layers, plan, lambda y, _: y.sum(), recompute=level) as pipe:
        for _ in range(last // 4):
            pipe.step(x, target=x)
        with pytest.raises(RuntimeError, match=told):
            pipe.step(x, target=x)


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_loss_is_recomputed_without_its_side_effects(level: Level) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls.add_(1)
            return F.mse_loss(output, target) * self.calls

    loss_fn = Counting()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    case = Case(layers, torch.randn(8, 6), torch.randn(8, 6), loss_fn)
    with case.pipeline(schedules.gpipe(1, 4), recompute=level) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
    assert loss_fn.calls == 2 * 4


def test_a_stage_may_not_hide_its_graph_from_the_next() -> None:
    layers = nn.Sequential(Wraps(6, 6), Unwraps(6, 6))
    case = Case(layers, torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    check_steps(case, schedules.gpipe(2, 2), None, [4])
    with (
        case.pipeline(schedules.gpipe(2, 2), recompute="layer") as pipe,
        pytest.raises(
            TypeError,
            match=r"stage 0 must hand over tensors in tuples, lists, dicts or other containers of "
            "torch.utils._pytree, got Opaque, which holds tensors that require grad",
        ),
    ):
        pipe.step(case.inputs, target=case.target)


def test_parameters_of_replicas_go_with_their_step() -> None:
    def parameters() -> int:
        gc.collect()
        return sum(type(one) is nn.Parameter for one in gc.get_objects())

    case = Case(nn.Sequential(linear(), linear()), torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    with case.pipeline(two_replicas(2, 4), recompute="layer") as pipe:
        before = parameters()
        pipe.step(case.inputs, target=case.target)
        assert parameters() == before
