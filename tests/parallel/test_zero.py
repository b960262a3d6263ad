"""State shared out to processes: the bits of one process that has all batches and all state."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import ZeroOptimizer
from tests import peers
from tests.parallel import data_runs
from tests.parallel.data_runs import NUM_MICROBATCHES, pipeline
from tests.parallel.reference import Reference, batch_of, expected, layers
from tests.support.comparison import assert_near_training, assert_same_training

SGD: Any = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM: Any = (torch.optim.AdamW, {"lr": 0.01})


def ten_steps(
    rank: int, rows: Sequence[int], optimizer: Any, options: dict[str, Any], every: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    kind, defaults = optimizer
    return data_runs.ten_steps(
        rank, rows, lambda pipe: ZeroOptimizer(pipe, kind, **defaults), options, every
    )


def plain(optimizer: Any) -> Any:
    return partial(optimizer[0], **optimizer[1])


@pytest.mark.parametrize(
    ("schedule", "options", "optimizer"),
    [
        ("gpipe", {}, SGD),
        ("one_f_one_b", {}, ADAM),
        ("one_f_one_b", {"recompute": "stage"}, SGD),
        ("zb_h1", {}, ADAM),
        ("interleaved", {"num_chunks": 2}, ADAM),
        ("hanayo", {"waves": 1}, ADAM),
        ("gpipe", {}, (torch.optim.Adagrad, {"lr": 0.01})),
    ],
)
def test_two_processes_train_as_one_bit_for_bit(
    schedule: str, options: dict[str, Any], optimizer: Any
) -> None:
    rows = (8, 5)
    found = peers.run(2, ten_steps, rows, optimizer, {"schedule": schedule, **options})
    wanted = expected(rows, NUM_MICROBATCHES, plain(optimizer))
    for of_process in found:
        assert_same_training(of_process, wanted)


def test_four_processes_agree_and_are_near() -> None:
    """The order in which four sums are added is gloo's own."""
    rows = (5, 8, 3, 8)
    found = peers.run(4, ten_steps, rows, SGD, {})
    # Each gradient, here below one, is off by at most three roundings of a sum of four. Ten steps
    # of this rate and momentum add these up to less than ten of them, and what comes of it in later
    # gradients is less than ten times as much.
    assert_near_training(found, expected(rows, NUM_MICROBATCHES, plain(SGD)), 10 * 3 * 2**-24 * 10)


def test_steps_without_sums_accumulate() -> None:
    """Each process keeps all of its own gradients until the sum, as without the optimizer."""
    rows = (8, 8)
    found = peers.run(2, ten_steps, rows, ADAM, {}, 2)

    model = nn.Sequential(*copy.deepcopy(layers()))
    optimizer = plain(ADAM)(model.parameters())
    for number in range(0, 10, 2):
        for p, *of_both in zip(model.parameters(), *_accumulated(model, number), strict=True):
            p.grad = of_both[0] + of_both[1]
        optimizer.step()
        optimizer.zero_grad()
    for _, parameters in found:
        assert all(map(torch.equal, parameters.values(), model.parameters()))


def _accumulated(model: nn.Module, number: int) -> list[list[Tensor]]:
    """Two steps of each process, its microbatches added in ascending order."""
    of_ranks = []
    for rank in range(2):
        for later in (number, number + 1):
            x, y = batch_of(later, rank, 8)
            for x_part, y_part in zip(x.chunk(4), y.chunk(4), strict=True):
                nn.functional.mse_loss(model(x_part), y_part).backward(torch.tensor(2 / 16))
        of_ranks.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    return of_ranks


def accumulate_sums(rank: int) -> tuple[dict[str, bool], dict[str, Tensor]]:
    """Two steps that each end with sums; which gradients are there, and what they are."""
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        for number in range(2):
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)
        owned = {id(parameter) for parameter in optimizer._owned}
        return (
            {name: id(p) in owned for name, p in pipe.named_parameters()},
            {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None},
        )


def test_a_gradient_is_in_the_process_that_owns_it() -> None:
    """Gradients that are there before a step count once: the owner adds its own part to it, then
    the sum."""
    found = peers.run(2, accumulate_sums)
    for owned, gradients in found:
        assert gradients.keys() == {name for name, is_owned in owned.items() if is_owned}
    assert len(found[0][1]) == len(found[1][1]) == 8
    assert not found[0][1].keys() & found[1][1].keys()
    model = nn.Sequential(*layers())
    names = [name for name, _ in model.named_parameters()]
    for rank, (_, gradients) in enumerate(found):
        reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
        model.zero_grad()
        for number in range(2):
            # The owner's part is added to what it has; the other's is added to that.
            both = [batch_of(number, which, 8) for which in (rank, 1 - rank)]
            reference.step(both)
        for name, parameter in zip(names, model.parameters(), strict=True):
            if name in gradients:
                assert parameter.grad is not None
                assert torch.equal(gradients[name], parameter.grad), name


def state_bytes(rank: int, shared_out: bool) -> int:
    with pipeline() as pipe:
        optimizer: torch.optim.Optimizer
        if shared_out:
            optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        else:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        x, y = batch_of(0, rank, 8)
        pipe.step(x, target=y)
        optimizer.step()
        tensors = [value for entries in optimizer.state.values() for value in entries.values()]
        return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("num_peers", [2, 4])
def test_each_process_keeps_its_part_of_the_state(num_peers: int) -> None:
    (whole, *_) = peers.run(1, state_bytes, False)
    assert whole > 0
    assert peers.run(num_peers, state_bytes, True) == [whole // num_peers] * num_peers


def clipped(rank: int, norm_type: float) -> tuple[list[Tensor], list[Tensor]]:
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        norms = []
        for number in range(3):
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)
            norms.append(optimizer.clip_grad_norm_(0.05, norm_type))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.clip_grad_norm_(1.0) == 0
        with pytest.raises(
            RuntimeError,
            match="clip_grad_norm_ must be called of the ZeroOptimizer, in every process, got a "
            "call in a process that has the gradients of some parameters only",
        ):
            pykern.clip_grad_norm_(pipe.parameters(), 1.0)
        return norms, [parameter.detach() for parameter in pipe.parameters()]


@pytest.mark.parametrize("norm_type", [2.0, torch.inf, 1.0])
def test_clipping_by_the_norm_over_all_processes(norm_type: float) -> None:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for number in range(3):
        reference.step([batch_of(number, rank, 8) for rank in range(2)])
        norms.append(pykern.clip_grad_norm_(model.parameters(), 0.05, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    for found, parameters in peers.run(2, clipped, norm_type):
        assert all(map(torch.equal, found, norms))
        assert all(map(torch.equal, parameters, model.parameters()))


def grouped(rank: int) -> tuple[list[float], list[Tensor]]:
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, _groups(pipe), lr=0.1)

        def step(number: int) -> Tensor:
            x, y = batch_of(number, rank, 8)
            return pipe.step(x, target=y)

        return _scheduled(optimizer, pipe, step)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]


def _scheduled(
    optimizer: torch.optim.Optimizer, model: nn.Module, step: Callable[[int], Any]
) -> tuple[list[float], list[Tensor]]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for number in range(4):
        optimizer.step(partial(step, number))
        scheduler.step()
        optimizer.zero_grad()
    return list(map(float, scheduler.get_last_lr())), [p.detach() for p in model.parameters()]


def test_groups_schedulers_and_closures() -> None:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(_groups(model), lr=0.1)
    rates, parameters = _scheduled(
        optimizer, model, lambda n: reference.step([batch_of(n, rank, 8) for rank in range(2)])
    )
    for found, of_process in peers.run(2, grouped):
        assert found == rates
        assert all(map(torch.equal, of_process, parameters))


def cleared(rank: int) -> list[Tensor]:
    """The state is cleared after two of four steps."""
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for number in range(4):
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)
            if number == 2:
                optimizer.state.clear()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]


def test_state_that_the_user_clears_is_gone() -> None:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(4):
        reference.step([batch_of(number, rank, 8) for rank in range(2)])
        if number == 2:
            optimizer.state.clear()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in peers.run(2, cleared):
        assert all(map(torch.equal, parameters, model.parameters()))


def share(rank: int) -> dict[str, Any]:
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        x, y = batch_of(0, rank, 8)
        pipe.step(x, target=y)
        optimizer.step()
        return optimizer.state_dict()


def loaded(rank: int, shares: Sequence[dict[str, Any]]) -> list[str]:
    """The error of each share that a process loads, in turn; empty if it is the process's own."""
    errors = []
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for one in shares:
            try:
                optimizer.load_state_dict(one)
                errors.append("")
                assert optimizer.state_dict()["state"].keys() == one["state"].keys()
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_the_share_of_another_process_is_refused() -> None:
    shares = peers.run(2, share)
    for rank, errors in enumerate(peers.run(2, loaded, shares)):
        assert not errors[rank]
        assert "state_dict must be the share of this process" in errors[1 - rank]
    assert all(peers.run(1, loaded, shares)[0])


def tied_and_frozen(rank: int) -> list[Tensor]:
    """A weight of two stages, a bias that does not train, and one that trains later."""
    model = tied_model()
    with pipeline(model, balance=[2, 2]) as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for number in range(4):
            if number == 2:
                first = next(iter(pipe.children()))
                first.requires_grad_(True)
                x, y = batch_of(number, rank, 8)
                with pytest.raises(
                    RuntimeError,
                    match=r"must belong to the ZeroOptimizer, got .*Add it by add_param_group",
                ):
                    pipe.step(x, target=y)
                optimizer.add_param_group({"params": [first.bias], "lr": 0.5})
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]


def tied_model() -> nn.Sequential:
    torch.manual_seed(3)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    first.bias.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), last)


def data_parallel_alone(rank: int) -> list[Tensor]:
    with pipeline(tied_model(), balance=[2, 2]) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=0.01)
        for number in range(4):
            if number == 2:
                first = next(iter(pipe.children()))
                first.requires_grad_(True)
                optimizer.add_param_group({"params": [first.bias], "lr": 0.5})
            x, y = batch_of(number, rank, 8)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]


@pytest.mark.parametrize("num_peers", [1, 2])
def test_tied_frozen_and_thawed(num_peers: int) -> None:
    wanted, *_ = peers.run(num_peers, data_parallel_alone)
    for found in peers.run(num_peers, tied_and_frozen):
        assert all(map(torch.equal, found, wanted))


def names_of_groups(rank: int) -> list[list[str]]:
    with pipeline() as pipe:
        *first, last = pipe.named_parameters()
        optimizer = ZeroOptimizer(pipe, torch.optim.SGD, first)
        optimizer.add_param_group({"params": [last]})
        return [group["param_names"] for group in optimizer.state_dict()["param_groups"]]


def test_parameters_keep_their_names() -> None:
    *first, last = dict(nn.Sequential(*layers()).named_parameters())
    assert peers.run(2, names_of_groups) == [[first, [last]]] * 2
