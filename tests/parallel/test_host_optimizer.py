"""Optimizers on the host: parameters equal the plain optimizer's, to the bit."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import pykern
from pykern import HostOptimizer
from pykern.plan import Kind
from tests.loop.loops import WIDTH, assert_same, batch, mlp, pipeline, plain_loop_step, twins
from tests.loop.test_optimizers import CASES, KINDS, MATRICES

SIZES = (7, 3, 8, 1, 12)


def all_streamed(optimizer: HostOptimizer) -> bool:
    """Whether the last step found all gradients on the host as they were."""
    return all(part.num_streamed == len(part.mirrors) for part in optimizer._parts)


def none_streamed(optimizer: HostOptimizer) -> bool:
    return all(part.num_streamed == 0 for part in optimizer._parts)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_optimizer(name: str, options: dict[str, Any]) -> None:
    model, plain = twins(mlp())
    with pipeline(model, schedule="zb_h1") as pipe:
        chosen = [
            [p for p in one.parameters() if p.dim() == 2 or name not in MATRICES]
            for one in (pipe, plain)
        ]
        ours = HostOptimizer(pipe, KINDS[name], chosen[0], lr=0.05, **options)
        theirs = KINDS[name](chosen[1], lr=0.05, **options)  # type: ignore[call-arg]
        for step in range(10):
            x, y = batch(SIZES[step % len(SIZES)])
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            ours.step()
            assert all_streamed(ours)
            theirs.step()
            assert_same(pipe, plain)
            for optimizer in (ours, theirs):
                optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "hanayo", "chimera"])
def test_gradients_accumulate_over_steps(schedule: str) -> None:
    model, plain = twins(mlp(8))
    with pipeline(model, schedule=schedule, microbatches=4) as pipe:
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9)
        assert sum(a.kind is Kind.REDUCE for row in pipe.plan.rows for a in row) == (
            pipe.plan.num_stages
        )
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            x, y = batch(4 * SIZES[step % len(SIZES)])
            pipe.step(x, target=y)
            if schedule == "chimera":
                for ours_p, theirs_p in zip(pipe.parameters(), plain.parameters(), strict=True):
                    assert ours_p.grad is not None
                    theirs_p.grad = ours_p.grad.clone()
            else:
                plain_loop_step(plain, x, y, num_microbatches=4)
            if step % 2:
                ours.step()
                assert all_streamed(ours)
                theirs.step()
                ours.zero_grad()
                theirs.zero_grad()
            assert_same(pipe, plain)


def test_what_is_done_to_gradients_counts() -> None:
    """By torch's clipping, ours, `.data`, and what replaces a gradient or takes it away."""
    model, plain = twins(mlp())

    def clip(parameters: list[nn.Parameter]) -> None:
        pykern.clip_grad_norm_(parameters, 0.01)

    def clip_by_torch(parameters: list[nn.Parameter]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    def by_data(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.5)

    def replace(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 3

    def take_away(parameters: list[nn.Parameter]) -> None:
        parameters[0].grad = parameters[-1].grad = None

    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for change in (clip, clip_by_torch, by_data, replace, take_away):
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for one in (pipe, plain):
                change(list(one.parameters()))
            ours.step()
            assert change is take_away or none_streamed(ours)
            theirs.step()
            assert_same(pipe, plain)
            ours.zero_grad()
            theirs.zero_grad()


def test_a_scaler_unscales() -> None:
    """Its unscaling is not counted by torch's versions."""
    model, plain = twins(mlp())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in "ab"]
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(6):
            x, y = batch()
            if step == 3:
                y[0, 0] = torch.inf
            pipe.step(x, target=y, scaler=scalers[0])
            plain_loop_step(plain, x, y, scaler=scalers[1])
            for scaler, optimizer in zip(scalers, (ours, theirs), strict=True):
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert_same(pipe, plain)
        assert scalers[0].state_dict() == scalers[1].state_dict()


def test_a_scaler_of_which_the_step_knows_nothing() -> None:
    model, plain = twins(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pipeline(model, loss_fn=lambda a, b: 4 * F.mse_loss(a, b)) as pipe:
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        x, y = batch()
        pipe.step(x, target=y)
        plain_loop_step(plain, x, y)
        versions = [p.grad._version for p in pipe.parameters() if p.grad is not None]
        scaler.unscale_(ours)
        assert versions == [p.grad._version for p in pipe.parameters() if p.grad is not None]
        ours.step()
        theirs.step()
        assert_same(pipe, plain)


def test_schedulers_groups_and_closures() -> None:
    model, plain = twins(mlp())
    with pipeline(model) as pipe:
        optimizers: list[Any] = []
        for one in (pipe, plain):
            weights = [p for p in one.parameters() if p.dim() == 2]
            others = [p for p in one.parameters() if p.dim() == 1]
            groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
            made = HostOptimizer(pipe, torch.optim.AdamW, groups, lr=0.1) if one is pipe else None
            optimizers.append(made or torch.optim.AdamW(groups, lr=0.1))
        schedulers = [lr_scheduler.CosineAnnealingLR(one, 5) for one in optimizers]
        for _ in range(4):
            x, y = batch()
            assert optimizers[0].step(lambda: pipe.step(x, target=y)) is not None  # noqa: B023
            optimizers[1].step(lambda: plain_loop_step(plain, x, y))  # noqa: B023
            for scheduler, optimizer in zip(schedulers, optimizers, strict=True):
                scheduler.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert optimizers[0].param_groups[1]["lr"] == schedulers[0].get_last_lr()[1]


def test_state_that_the_user_changes_counts() -> None:
    """The state is cleared, as after a warm-up; later a parameter's is doubled."""
    model, plain = twins(mlp())
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for number in range(4):
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            pairs: list[tuple[nn.Module, Any]] = [(pipe, ours), (plain, theirs)]
            for root, optimizer in pairs:
                if number == 1:
                    optimizer.state.clear()
                    assert not optimizer.state_dict()["state"]
                if number == 3:
                    entries = optimizer.state[next(root.parameters())]
                    entries["exp_avg"] = entries["exp_avg"] * 2
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)


def test_parameters_that_change_groups_are_refused() -> None:
    with pipeline(mlp()) as pipe:
        first, *others = pipe.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": 0.5}]
        optimizer = HostOptimizer(pipe, torch.optim.SGD, groups, lr=0.1)
        moved = optimizer.param_groups[1]["params"].pop()
        optimizer.param_groups[0]["params"].append(moved)
        message = "param_groups must keep their parameters, got groups with others"
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        del optimizer.param_groups[0]
        with pytest.raises(ValueError, match=message):
            optimizer.step()


def test_parts_that_are_frozen_and_thawed() -> None:
    model, plain = twins(mlp())
    for one in (model, plain):
        one[0].requires_grad_(False)
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        assert len(ours._mirrors) == 4
        for step in range(4):
            if step == 2:
                pairs: list[tuple[nn.Module, Any]] = [(pipe, ours), (plain, theirs)]
                for root, optimizer in pairs:
                    first = next(iter(root.children()))
                    first.requires_grad_(True)
                    optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)


def test_tied_parameters_are_stepped_by_their_whole_gradient() -> None:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), last)
    twin = copy.deepcopy(model)
    with pipeline(model, balance=[1, 3]) as pipe, pipeline(twin, balance=[1, 3]) as other:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.1)
        for _ in range(3):
            x, y = batch()
            for one, optimizer in ((pipe, ours), (other, theirs)):
                one.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_masters_in_float32(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-3)
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
        for _ in range(10):
            x, y = batch()
            pipe.step(x.to(dtype), target=y.to(dtype))
            for parameter, master in zip(pipe.parameters(), masters, strict=True):
                assert parameter.grad is not None
                assert parameter.grad.dtype == dtype
                master.grad = parameter.grad.float()
            ours.step()
            theirs.step()
            for parameter, master in zip(pipe.parameters(), masters, strict=True):
                assert torch.equal(parameter, master.to(dtype))
            ours.zero_grad()
        assert ours.state[next(iter(pipe.parameters()))]["exp_avg"].dtype == torch.float32


def test_parameters_that_are_set_from_outside_are_read_again() -> None:
    model, plain = twins(mlp())
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        other = mlp().state_dict()
        for step in range(4):
            if step == 1:
                pipe.load_state_dict(other)
                plain.load_state_dict(other)
            if step == 2:
                for one in (pipe, plain):
                    parameter = next(iter(one.parameters()))
                    parameter.data = torch.ones_like(parameter)
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)


def test_half_precision_keeps_the_bits_of_masters_where_the_same_values_are_loaded() -> None:
    model = mlp().bfloat16()
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=1e-4)
        x, y = (each.bfloat16() for each in batch())
        pipe.step(x, target=y)
        ours.step()
        before = {p: m.master.detach().clone() for p, m in ours._mirrors.items()}
        pipe.load_state_dict({name: value.clone() for name, value in pipe.state_dict().items()})
        ours._parts[0].follow()
        ours._parts[1].follow()
        assert any(not torch.equal(p.float(), before[p]) for p in pipe.parameters())
        assert all(torch.equal(m.master, before[p]) for p, m in ours._mirrors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_of_its_own_and_the_plain_optimizers(dtype: torch.dtype) -> None:
    def run(pipe: pykern.Pipeline, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            x = torch.randn(6, WIDTH, generator=generator).to(dtype)
            optimizer.zero_grad()
            pipe.step(x, target=x)
            optimizer.step()

    model, twin = twins(mlp().to(dtype))
    with pipeline(model) as pipe, pipeline(twin) as other:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        run(pipe, ours, 1)
        other.load_state_dict(pipe.state_dict())
        again: torch.optim.Optimizer = HostOptimizer(other, torch.optim.AdamW, lr=5.0)
        again.load_state_dict(copy.deepcopy(ours.state_dict()))
        assert again.param_groups[0]["lr"] == 0.01
        run(pipe, ours, 2)
        run(other, again, 2)
        assert_same(pipe, other)
        if dtype == torch.float32:
            other.load_state_dict(pipe.state_dict())
            again = torch.optim.AdamW(other.parameters())
            again.load_state_dict(copy.deepcopy(ours.state_dict()))
            run(pipe, ours, 3)
            run(other, again, 3)
            assert_same(pipe, other)


def test_parameters_keep_their_names() -> None:
    first, second = [f"{number}" for number in range(3)], ["last"]
    model = mlp()
    with pipeline(model) as pipe:
        parameters = list(pipe.parameters())[:4]
        ours = HostOptimizer(pipe, torch.optim.SGD, list(zip(first, parameters, strict=False)))
        ours.add_param_group({"params": [(second[0], parameters[-1])]})
        groups = ours.state_dict()["param_groups"]
        assert [group["param_names"] for group in groups] == [first, second]
        ours.load_state_dict(ours.state_dict())
