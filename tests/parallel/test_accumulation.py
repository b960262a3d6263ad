"""Gradients that add up over several steps, over stages, or that only some processes have."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from tests import peers
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of, expected, layers
from tests.parallel.test_data import ten_steps
from tests.support.comparison import assert_same_training

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ROWS = (6, 8)


def test_every_step_adds_what_it_sums_bit_for_bit() -> None:
    found = peers.run(2, accumulated, "all")
    assert_same_training(found[0], expected(ROWS, 4, SGD, every=2))
    assert_same_training(found[1], found[0])


def accumulated(rank: int, synced: str) -> Any:
    """Ten steps with an update after each second, where those of `synced` are summed."""
    with pipeline() as pipe:
        optimizer = SGD(pipe.parameters())
        losses = []
        for number in range(10):
            x, y = batch_of(number, rank, ROWS[rank])
            with nullcontext() if synced == "all" or number % 2 else pipe.no_sync():
                losses.append(pipe.step(x, target=y))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses, {name: value.detach() for name, value in pipe.named_parameters()}


def own_sums(rank_rows: Sequence[int]) -> Any:
    """The rule of `no_sync`, written out: each process's steps add up before those of processes."""
    model = nn.Sequential(*layers())
    optimizer = SGD(model.parameters())
    losses = []
    for start in range(0, 10, 2):
        sums: list[list[Tensor]] = []
        step_losses = [[torch.zeros(()) for _ in rank_rows] for _ in range(2)]
        for rank, rows in enumerate(rank_rows):
            model.zero_grad()
            for number in (start, start + 1):
                x, y = batch_of(number, rank, rows)
                for part, goal in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                    loss = nn.functional.mse_loss(model(part), goal)
                    weight = len(part) / sum(rank_rows)
                    loss.backward(torch.full_like(loss, weight))
                    step_losses[number - start][rank] += loss.detach() * weight
            sums.append([p.grad for p in model.parameters() if p.grad is not None])
        for parameter, first, second in zip(model.parameters(), *sums, strict=True):
            parameter.grad = first + second
        losses += [first + second for first, second in step_losses]
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def test_steps_within_no_sync_add_up_in_each_process_first() -> None:
    found = peers.run(2, accumulated, "last")
    assert_same_training(found[0], own_sums(ROWS))
    assert_same_training(found[1], found[0])


def nothing_is_sent_within_no_sync(rank: int) -> Any:
    with pipeline() as pipe:
        x, y = batch_of(0, rank, 8)
        with pipe.no_sync():
            pipe.step(x, target=y)
        alone = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        rows = pipe.reductions().rows
        return alone, rows


def test_gradients_within_no_sync_are_each_processes_own() -> None:
    (first, rows), (second, _) = peers.run(2, nothing_is_sent_within_no_sync)
    assert rows == ()
    assert len(first) == len(second) == 16
    assert not any(map(torch.equal, first, second))


class Picks(nn.Module):
    """Uses one of two layers, by the sign of what it gets first."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.high if float(x.detach()[0, 0]) > 0 else self.low
        result: Tensor = chosen(x)
        return result


def gradients_of_picks(rank: int, sign: float) -> dict[str, Tensor | None]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Identity(), Picks())
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=1,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        x = torch.full((2, 6), (-1.0 if rank else 1.0) * sign)
        pipe.step(x, target=torch.zeros(2, 6))
        return {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_some_processes_have_no_gradient_for_gets_that_of_the_others(sign: float) -> None:
    first, second = peers.run(2, gradients_of_picks, sign)
    for name, gradient in first.items():
        other = second[name]
        if "never" in name:
            assert gradient is None
            assert other is None
        else:
            assert gradient is not None
            assert other is not None
            assert torch.equal(gradient, other)
            assert gradient.any()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.table(x)
        return result


def sparse(rank: int) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Sparse(), nn.Linear(6, 6))
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        pipe.step(torch.tensor([0, 1, 2]), target=torch.zeros(3, 6))


def test_sparse_gradients_are_refused_in_all_processes() -> None:
    for error in peers.outcomes(2, sparse):
        assert isinstance(error, TypeError)
        assert (
            "gradients must be dense to be summed over processes, got a sparse gradient of "
            "a parameter of shape (4, 6)"
        ) in str(error)


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(6, 6) / 3)
    return [Tied(weight), nn.Linear(6, 6), nn.Linear(6, 6), Tied(weight)]


def tied(rank: int, process_group: bool) -> dict[str, Tensor]:
    group = {"process_group": dist.group.WORLD} if process_group else {}
    model = nn.Sequential(*tied_layers())
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        reduction="sum",
        **group,  # type: ignore[arg-type]
    ) as pipe:
        x, y = batch_of(0, rank, 4)
        pipe.step(x, target=y)
        return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


def test_shared_parameters_are_summed_over_stages_and_then_over_processes() -> None:
    together = peers.run(2, tied, True)
    first, second = peers.run(2, tied, False)
    for of_process in together:
        assert of_process.keys() == first.keys()
        for name, gradient in of_process.items():
            assert torch.equal(gradient, first[name] + second[name]), name


def frozen(rank: int) -> dict[str, bool]:
    model = nn.Sequential(*copy.deepcopy(layers()))
    for layer in list(model)[:2]:
        layer.requires_grad_(False)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        for number in range(2):
            x, y = batch_of(number, rank, 4)
            pipe.step(x, target=y)
            # From now on the second stage alone has something to send.
            model[2].requires_grad_(False)
        return {name: p.grad is None for name, p in pipe.named_parameters()}


def test_frozen_layers_send_nothing() -> None:
    for of_process in peers.run(2, frozen):
        assert of_process["0.0.weight"]
        assert not of_process["3.0.weight"]


def test_a_pipeline_of_one_process_is_as_one_without_a_group() -> None:
    (found,) = peers.run(1, ten_steps, (8,), SGD, {})
    assert_same_training(found, expected((8,), 4, SGD))
