"""State that modules share outside their arguments, in models that are recorded."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.trace import CutError

from .passing import (
    MICROBATCHES,
    SPACE,
    WAYS,
    WIDTH,
    Block,
    Get,
    Leaf,
    Outer,
    Put,
    assert_same,
    batch,
    detached,
    nothing,
    number,
    pipeline,
    step,
)


def scale(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True) * 1.5


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_leaves_for_its_blocks_is_carried(way: str) -> None:
    """The blocks would always read the sample's value."""
    get, put = WAYS[way]
    assert_same(Outer([Block(get) for _ in range(4)], lambda m, x: put(m, scale(x))), 2)
    # With a graph of its own.
    learned = Outer([Block(get) for _ in range(4)])
    learned.into = nn.Linear(WIDTH, 1)
    learned.before = lambda m, x: put(m, m.into(x))  # type: ignore[operator]
    assert_same(learned, 2)


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_carried_is_refused(way: str) -> None:
    get, put = WAYS[way]
    model = Outer([Leaf(get) for _ in range(4)], lambda m, x: put(m, scale(x)))
    message = (
        r"blocks\.0 reads a tensor \(passing\.py:\d+\) that it is not given as an argument, and "
        r"that the forward around it has made \(test_beside\.py:\d+\): .* [pP]ass it as an argument"
    )
    with pytest.raises(CutError, match=message):
        pipeline(model, 2)


def _set_attributes(model: nn.Module, x: Tensor) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.value = scale(x)


def _set_buffers(model: nn.Module, x: Tensor) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.buffer = x.detach().mean()


def _write_buffers(model: nn.Module, x: Tensor) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.buffer.copy_(x.detach().mean())


def _get_buffer(block: nn.Module) -> Any:
    return block.buffer


@pytest.mark.parametrize(
    ("before", "get", "name"),
    [
        (_set_attributes, lambda block: block.value, "value"),
        (_set_buffers, _get_buffer, "buffer"),
    ],
)
def test_attributes_of_blocks_are_refused(before: Put, get: Get, name: str) -> None:
    with pytest.raises(CutError, match=rf"leaves a tensor in Block\.{name}, which"):
        pipeline(Outer([Block(get) for _ in range(4)], before), 2)
    leaves = [Leaf(get) for _ in range(4)]
    for leaf in leaves:
        leaf.register_buffer("buffer", torch.ones(()))
    with pytest.raises(CutError, match=r"blocks\.0 reads a tensor .* the forward around it"):
        pipeline(Outer(leaves, before), 2)


def test_buffers_of_blocks_that_the_forward_writes() -> None:
    """The forward handed over the memory of the buffer, which the next microbatch writes."""
    with pytest.raises(
        CutError, match=r"writes into the buffer blocks\.2\.buffer and uses it in se"
    ):
        pipeline(Outer([Block(_get_buffer) for _ in range(4)], _write_buffers), 2)


def test_numbers_that_the_forward_sets_are_refused() -> None:
    """The numbers of one microbatch were read by all."""
    for kind in (Block, Leaf):
        for way in ("attribute", "dict", "list", "global", "closure"):
            get, put = WAYS[way]
            model = Outer([kind(get) for _ in range(4)], number(put))
            with pytest.raises(CutError, match=r"the forward sets .* before it calls blocks\.0"):
                pipeline(model, 2)
            number(put)(model, torch.zeros(()))


def test_numbers_of_blocks_that_the_forward_sets_are_refused() -> None:
    def before(model: nn.Module, x: Tensor) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.length = x.shape[0]

    model = Outer([Block(lambda block: block.length) for _ in range(4)], before)
    with pytest.raises(CutError, match=r"the forward sets Block\.length before it calls blocks\.0"):
        pipeline(model, 2)


@pytest.mark.parametrize("kind", [Block, Leaf])
def test_from_block_to_block_within_a_stage_only(kind: Callable[..., nn.Module]) -> None:
    get, put = WAYS["attribute"]

    def model(writer: int, reader: int) -> nn.Module:
        return Outer(
            [
                kind(
                    get if at == reader else nothing,
                    detached(put) if at == writer else nothing,
                )
                for at in range(4)
            ]
        )

    assert_same(model(0, 1), 2)
    message = (
        r"blocks\.3 reads a tensor \(passing\.py:\d+\) .* that blocks\.0 has made "
        r"\(passing\.py:\d+\), in stages 1 and 0, which .* [pP]ass it as an argument"
    )
    with pytest.raises(CutError, match=message):
        pipeline(model(0, 3), 2)


class Reading(Outer):
    """Reads what blocks have left in themselves."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.left
        return x


def test_what_blocks_leave_for_the_forward_around() -> None:
    """Without a graph it was taken for a constant."""
    keep: Put = lambda block, y: setattr(block, "left", y)  # noqa: E731
    model = Reading([Leaf(put=detached(keep)) for _ in range(4)])
    with pytest.raises(
        CutError, match=r"test_beside\.py:\d+ uses a tensor .* made where it is not"
    ):
        pipeline(model, 2)
    for devices in (1, 2):
        model = Reading([Leaf(put=number(keep)) for _ in range(4)])
        message = r"blocks\.0 \(.*\) sets Leaf\.left to a value that it has read of a tensor"
        with pytest.raises(CutError, match=message):
            pipeline(model, devices)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.sum().item(),
        lambda y: bool(y.sum() > 0),
        lambda y: torch.equal(y, 2 * y),
        lambda y: torch.allclose(y, 2 * y),
    ],
)
def test_a_number_is_read_in_any_way(read: Callable[[Tensor], Any], mode: Any) -> None:
    """The word of `torch.equal` was the sample's for ever; in inference mode all numbers were."""
    model = Reading([Leaf(put=lambda block, y: setattr(block, "left", read(y))) for _ in range(4)])
    message = r"blocks\.0 \(.*\) sets Leaf\.left to a value that it has read of a tensor"
    with mode(), pytest.raises(CutError, match=message):
        pipeline(model, 2)


class ReadingByNames(Outer):
    """Reads the same by names in a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            for name in ("left", "right"):
                x = x * getattr(block, name, 1.0)
        return x


def test_names_in_a_tuple_count() -> None:
    """The forward went on with the sample's number."""
    keep: Put = lambda block, y: setattr(block, "left", y)  # noqa: E731
    with pytest.raises(CutError, match=r"sets Leaf\.left to a value that it has read of a tensor"):
        pipeline(ReadingByNames([Leaf(put=number(keep)) for _ in range(4)]), 2)


def test_numbers_that_are_only_kept_are_fine() -> None:
    keep: Put = lambda block, y: setattr(block, "norm_for_a_log", y)  # noqa: E731
    assert_same(Outer([Block(put=number(keep)) for _ in range(4)]), 2)


def test_random_numbers_of_the_forward_are_not_those_of_the_sample() -> None:
    model = Outer(
        [Leaf(lambda _: SPACE.value) for _ in range(4)],
        lambda _, x: setattr(SPACE, "value", torch.rand(WIDTH)),
    )
    with pytest.raises(CutError, match="the forward around it has made"):
        pipeline(model, 2)


def test_what_is_left_of_a_recording_is_not_for_the_loss() -> None:
    space = SimpleNamespace()

    def before(_: nn.Module, x: Tensor) -> None:
        space.value = x.detach().mean()

    model = Outer([Block() for _ in range(4)], before)
    loss = lambda output, target: F.mse_loss(output, target) * space.value  # noqa: E731
    message = r"stage 1 reads a tensor .* made while the forward was recorded \(test_beside"
    with pytest.raises(CutError, match=message):
        step(model, 2, loss)
    with pytest.raises(CutError, match="made while the forward was recorded"):
        step(model, 1, loss)


def test_what_is_left_of_a_recording_is_not_for_the_next() -> None:
    space = SimpleNamespace(value=None)

    def before(_: nn.Module, x: Tensor) -> None:
        if space.value is not None:
            x.mul_(space.value)
        space.value = x.detach().mean()

    x, y = batch()
    with pytest.raises(CutError, match=r"test_beside\.py:\d+ uses a tensor"):  # noqa: SIM117
        with pipeline(Outer([Block() for _ in range(4)], before), 2) as pipe:
            pipe.step(x[:MICROBATCHES], target=y[:MICROBATCHES])


def test_caches_and_counters_are_no_crossings() -> None:
    """A value that is the same for every microbatch may be left by the first microbatch."""
    cache: dict[int, Tensor] = {}

    def get(block: nn.Module) -> Tensor:
        vars(block)["calls"] = vars(block).get("calls", 0) + 1
        if WIDTH not in cache:
            cache[WIDTH] = torch.arange(WIDTH).float().cos()
        return cache[WIDTH]

    assert_same(Outer([Block(get) for _ in range(4)]), 2)


class Makes(dict[str, Any]):
    """Makes what it is asked for, such as the activations of Hugging Face's models."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)


MAKES = Makes(tanh=nn.PReLU)


def test_what_a_dict_makes_is_not_asked_for() -> None:
    def get(_: nn.Module) -> float:
        return float(len(MAKES))

    assert_same(Outer([Block(get) for _ in range(4)]), 2)
