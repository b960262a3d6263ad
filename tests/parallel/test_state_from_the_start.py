"""Optimizers whose state is there before a step, as that of Adagrad, keep it in another's place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pykern
from pykern import HostOptimizer, ZeroOptimizer
from tests import peers
from tests.parallel.data_runs import NUM_MICROBATCHES, pipeline
from tests.parallel.reference import Reference, batch_of, layers

LR = 0.1


class Anchored(Optimizer):
    """Descends, and is drawn back to where its parameters have come to it."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["anchor"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    away = parameter - self.state[parameter]["anchor"]
                    parameter.sub_(group["lr"] * (parameter.grad + away))


def trained(
    root: nn.Module, make: Callable[[Any], Any], step: Callable[[int], object]
) -> list[Tensor]:
    """The parameters after four steps, the second half of them in a group that is added later."""
    parameters = list(root.parameters())
    half = len(parameters) // 2
    first, later = parameters[:half], parameters[half:]
    for parameter in later:
        parameter.requires_grad_(False)
    optimizer = make(first)
    for number in range(4):
        if number == 2:
            # A change of the user's counts, also where a group comes before the next step. Only the
            # owner of a parameter has its state.
            if first[0] in optimizer.state:
                optimizer.state[first[0]] = {"anchor": torch.ones_like(first[0])}
            for parameter in later:
                parameter.requires_grad_()
            optimizer.add_param_group({"params": later})
        step(number)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]


def plain(num_processes: int) -> list[Tensor]:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)

    def step(number: int) -> None:
        reference.step([batch_of(number, rank, 8) for rank in range(num_processes)])

    return trained(model, lambda params: Anchored(params, lr=LR), step)


def ours(rank: int) -> list[Tensor]:
    with pipeline() as pipe:

        def step(number: int) -> None:
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)

        return trained(pipe, lambda params: ZeroOptimizer(pipe, Anchored, params, lr=LR), step)


def test_shared_out_to_processes() -> None:
    for parameters in peers.run(2, ours):
        assert all(map(torch.equal, parameters, plain(2)))


def test_on_the_host() -> None:
    with pykern.Pipeline(
        nn.Sequential(*layers()),
        devices="cpu:2",
        microbatches=NUM_MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    ) as pipe:

        def step(number: int) -> None:
            x, y = batch_of(number, 0, 8)
            pipe.step(x, target=y)

        found = trained(pipe, lambda params: HostOptimizer(pipe, Anchored, params, lr=LR), step)
    assert all(map(torch.equal, found, plain(1)))
