"""Tensor parallel inside stages: the plain model's numbers, and the bits of shards in one stage."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.optim import Optimizer

import pykern
from pykern.tensors.dtensor import is_dtensor, whole
from tests import peers
from tests.diagonal import nightly
from tests.parallel.reference import Reference
from tests.parallel.sharded import (
    assert_near,
    batch_of,
    layers,
    mesh_of,
    pipeline,
    plain_step,
    train,
    whole_parameters,
)
from tests.support.comparison import assert_same_tensors, assert_same_training

Found = tuple[list[Tensor], dict[str, Tensor]]

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)
SCHEDULES = [
    {"schedule": "zb_h1"},
    {"schedule": "hanayo", "waves": 1},
    {"schedule": "one_f_one_b", "recompute": "layer"},
    nightly({"schedule": "one_f_one_b"}),
    nightly({"schedule": "interleaved", "num_chunks": 2}),
    nightly({"schedule": "zb_v", "recompute": "stage"}),
]
# Processes take seconds to begin with DTensors.
pytestmark = pytest.mark.slow


def bound_of(dtype: torch.dtype) -> float:
    """How far from the plain model's a parameter may be after ten steps of `SGD`.

    Another order has what rows of `down` add up to, forward, and columns of `up`, backward: in each
    of six blocks two sums of at most 16 products, whose roundings are of numbers below 4. The
    layers behind have derivatives below 4, so a gradient is off by 4 * 6 * 2 * 16 * 4 roundings at
    most; ten steps with that momentum move a parameter by less than 0.1 * 10 * 10 of it.
    """
    return 4 * 6 * 2 * 16 * 4 * 0.1 * 10 * 10 * torch.finfo(dtype).eps / 2


def ten_steps(
    _: int, size: int, optimizer: Callable[..., Optimizer], dtype: torch.dtype, options: Any
) -> Found:
    with pipeline(mesh_of(size), layers(dtype), **options) as pipe:

        def step(number: int) -> Tensor:
            x, y = batch_of(number, dtype=dtype)
            return pipe.step(x, target=y)

        losses = train(step, optimizer(pipe.parameters()))
        return losses, whole_parameters(pipe)


@cache
def in_one_stage(size: int, optimizer: Callable[..., Optimizer], dtype: torch.dtype) -> Found:
    """The same shards on one device, where collectives come in one order anyway."""
    options = {"devices": "cpu:1", "schedule": "gpipe"}
    first, *others = peers.run(size, ten_steps, size, optimizer, dtype, options)
    for other in others:
        assert_same_training(other, first)
    return first


def plain(optimizer: Callable[..., Optimizer], dtype: torch.dtype) -> Found:
    model = nn.Sequential(*layers(dtype))
    losses = train(
        lambda number: plain_step(model, *batch_of(number, dtype=dtype)),
        optimizer(model.parameters()),
    )
    return losses, whole_parameters(model)


@pytest.mark.parametrize("options", SCHEDULES)
def test_schedules_have_the_bits_of_one_stage(options: dict[str, Any]) -> None:
    for found in peers.run(2, ten_steps, 2, ADAM, torch.float32, options):
        assert_same_training(found, in_one_stage(2, ADAM, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shards_train_as_the_plain_model_does(dtype: torch.dtype) -> None:
    found, wanted = in_one_stage(2, SGD, dtype), plain(SGD, dtype)
    for loss, other in zip(found[0], wanted[0], strict=True):
        assert abs(loss - other) <= bound_of(dtype)
    assert_near(found[1], wanted[1], bound_of(dtype))


def test_four_shards() -> None:
    options = {"devices": "cpu:2", "schedule": "one_f_one_b"}
    first, *others = peers.run(4, ten_steps, 4, SGD, torch.float64, options)
    for other in others:
        assert_same_training(other, first)
    assert_near(first[1], plain(SGD, torch.float64)[1], bound_of(torch.float64))


class Exact(nn.Module):
    """x + down(relu(up(x))) of small whole numbers: every sum is exact in float64."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.zeros_(parameter).add_(
                torch.randint(-2, 3, parameter.shape, generator=generator)
            )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def exact_layers() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return [Exact(generator) for _ in range(4)]


def exact_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(-2, 3, (2, 8, 4), generator=generator).double()
    return x, y


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 2


def exact_step(_: int, schedule: str) -> tuple[Tensor, dict[str, Tensor]]:
    options = {"schedule": schedule, "loss_fn": half_square, "reduction": "sum"}
    with pipeline(mesh_of(2), exact_layers(), **options) as pipe:
        x, y = exact_batch()
        loss = pipe.step(x, target=y)
        return loss, {name: whole(p.grad) for name, p in pipe.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["zb_h1", nightly("gpipe")])
def test_where_sums_are_exact_bits_are_the_plain_models(schedule: str) -> None:
    model = nn.Sequential(*exact_layers())
    x, y = exact_batch()
    wanted = half_square(model(x), y)
    wanted.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for loss, found in peers.run(2, exact_step, schedule):
        assert torch.equal(loss, wanted)
        assert_same_tensors(found, gradients)  # type: ignore[arg-type]


def a_loop(_: int, devices: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor, list[Tensor]]:
    """Accumulation, clipping, something frozen, and evaluation."""
    model = layers()
    frozen = model[3]
    frozen.requires_grad_(requires_grad=False)
    with pipeline(mesh_of(2), model, devices=devices) as pipe:
        before = whole_parameters(frozen)
        optimizer = ADAM(p for p in pipe.parameters() if p.requires_grad)
        norms = []
        for number in range(6):
            x, y = batch_of(number)
            pipe.step(x, target=y)
            if number % 2:
                norms.append(pykern.clip_grad_norm_(pipe.parameters(), 0.05))
                clipped = pykern.clip_grad_norm_(pipe.parameters(), 1.0)
                assert abs(clipped - 0.05) < 1e-6
                optimizer.step()
                optimizer.zero_grad()
        x, _y = batch_of(9, rows=5)
        output = pipe.eval()(x)
        assert torch.equal(next(pipe.stream([x])), output)
        assert_same_tensors(whole_parameters(frozen), before)
        return norms, whole_parameters(pipe), output, list(pipe(x))


def test_a_loop_with_all_that_is_usual() -> None:
    wanted = peers.run(2, a_loop, "cpu:1")[0]
    for found in peers.run(2, a_loop, "cpu:2"):
        assert_same_training(found[:2], wanted[:2])
        assert torch.equal(found[2], wanted[2])
        assert all(map(torch.equal, found[3], wanted[3]))


def test_the_norm_of_shards_is_that_of_the_whole() -> None:
    first, second = peers.run(2, norms_of)
    model = nn.Sequential(*layers(torch.float64))
    plain_step(model, *batch_of(0, dtype=torch.float64))
    for norm_type, one, other in zip(NORMS, first, second, strict=True):
        assert torch.equal(one, other)
        norm = pykern.clip_grad_norm_(model.parameters(), 1e9, norm_type)
        # The norm is off by no more than the sum of what 2,000 gradients are.
        assert abs(one - norm) <= 2000 * bound_of(torch.float64)


NORMS = (2.0, 1.0, float("inf"))


def norms_of(_: int) -> list[Tensor]:
    with pipeline(mesh_of(2), layers(torch.float64)) as pipe:
        x, y = batch_of(0, dtype=torch.float64)
        pipe.step(x, target=y)
        return [pykern.clip_grad_norm_(pipe.parameters(), 1e9, kind) for kind in NORMS]


def words() -> list[nn.Module]:
    """Embedding, blocks, norm, head: [rows, seq] of 12 words -> [rows, seq, 12]."""
    torch.manual_seed(3)
    return [nn.Embedding(12, 8), *layers()[1:5], nn.LayerNorm(8), nn.Linear(8, 12)]


SEQUENCES = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "*.norm": SequenceParallel(),
    "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "5": SequenceParallel(),
    "6": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def of_words(output: Tensor, target: Tensor) -> Tensor:
    loss: Any = F.cross_entropy(output.flatten(0, 1), target.flatten())
    return loss.to_local() if is_dtensor(loss) else loss


def sequences(_: int) -> tuple[Tensor, dict[str, Tensor], bool]:
    options = {"loss_fn": of_words, "balance": [3, 4]}
    mesh = mesh_of(2)
    with (
        loss_parallel(),
        pipeline(mesh, words(), tensor_parallel=(mesh, SEQUENCES), **options) as pipe,
    ):
        ids = some_words()
        loss = pipe.step(ids, target=ids)
        # In torch gradients of norms are parts of a sum, and the embedding's is whole.
        alike = all(p.grad.placements == p.placements for p in pipe.parameters())  # type: ignore[union-attr,attr-defined]
        gradients = {name: whole(p.grad) for name, p in pipe.named_parameters()}  # type: ignore[arg-type]
        return loss, gradients, alike


def some_words() -> Tensor:
    return torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(4))


def test_sequences_and_losses_in_shards() -> None:
    model = nn.Sequential(*words())
    wanted = of_words(model(some_words()), some_words())
    wanted.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for loss, found, alike in peers.run(2, sequences):
        assert alike
        # The loss is of one step, whose sums are of 48 words: see `bound_of`, which is of ten.
        assert abs(loss - wanted) <= bound_of(torch.float32)
        assert_near(found, gradients, bound_of(torch.float32))  # type: ignore[arg-type]


def partly_frozen() -> list[nn.Module]:
    model = words()
    model[1].requires_grad_(requires_grad=False)
    model[5].get_parameter("weight").requires_grad_(False)
    return model


def training(_: int) -> dict[str, bool]:
    mesh = mesh_of(2)
    styles = (mesh, SEQUENCES)
    with pipeline(mesh, partly_frozen(), tensor_parallel=styles, balance=[3, 4]) as pipe:
        return {name: parameter.requires_grad for name, parameter in pipe.named_parameters()}


def test_what_was_frozen_stays_frozen_in_shards() -> None:
    model = nn.Sequential(*partly_frozen())
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert set(wanted.values()) == {False, True}
    for found in peers.run(2, training):
        assert found == wanted


def with_dropout(_: int) -> Found:
    model = layers()
    model.insert(2, nn.Dropout(0.5))
    with pipeline(mesh_of(2), model) as pipe:
        torch.manual_seed(5)

        def step(number: int) -> Tensor:
            x, y = batch_of(number)
            return pipe.step(x, target=y)

        return train(step, SGD(pipe.parameters()), 3), whole_parameters(pipe)


def test_masks_are_the_same_in_all_processes() -> None:
    first, second = peers.run(2, with_dropout)
    assert_same_training(first, second)


def cube(rank: int, schedule: str) -> Found:
    """A pipeline of two devices in each of 2 x 2 processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    assert mine == rank // 2
    options: dict[str, Any] = {"schedule": schedule, "process_group": mesh["dp"]}
    with pipeline(mesh["tp"], layers(torch.float64), **options) as pipe:

        def step(number: int) -> Tensor:
            x, y = batch_of(number, mine, (6, 9)[mine], torch.float64)
            return pipe.step(x, target=y)

        losses = train(step, SGD(pipe.parameters()))
        return losses, whole_parameters(pipe)


@pytest.mark.parametrize("schedule", ["zb_h1", nightly("one_f_one_b")])
def test_data_tensor_and_pipeline_parallel(schedule: str) -> None:
    model = nn.Sequential(*layers(torch.float64))
    reference = Reference(model, 4, F.mse_loss)

    def step(number: int) -> Tensor:
        given = [batch_of(number, rank, (6, 9)[rank], torch.float64) for rank in range(2)]
        return reference.step(given)

    losses = train(step, SGD(model.parameters()))
    first, *others = peers.run(4, cube, schedule)
    for other in others:
        assert_same_training(other, first)
    # Two processes' sums have one order.
    for loss, wanted in zip(first[0], losses, strict=True):
        assert abs(loss - wanted) <= bound_of(torch.float64)
    assert_near(first[1], whole_parameters(model), bound_of(torch.float64))


def names_of(_: int) -> tuple[list[str], list[str], list[bool]]:
    with pipeline(mesh_of(2)) as pipe:
        state = pipe.state_dict()
        shapes = [str(value.shape) for value in state.values()]
        return list(state), shapes, list(map(is_dtensor, state.values()))


def test_names_and_shapes_are_the_models() -> None:
    state = nn.Sequential(*layers()).state_dict()
    for names, shapes, sharded in peers.run(2, names_of):
        assert names == list(state)
        assert shapes == [str(value.shape) for value in state.values()]
        assert sharded == [".up." in name or ".down." in name for name in names]
