"""Any optimizer and scheduler, over many steps: parameters equal the plain loop's, to the bit."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pykern
from pykern import schedules
from tests.loop.loops import assert_same, batch, mlp, pipeline, plain_loop_step, twins

Optimizer = torch.optim.Optimizer

# The options of each; all others of torch.optim take lr alone.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"foreach": True}, {"fused": True}],
    "Adam": [{"foreach": True}, {"fused": True, "amsgrad": True}],
    "AdamW": [{"foreach": True}, {"fused": True}],
    "Adagrad": [{"fused": True}],
    "ASGD": [{"foreach": True}],
}
# It wants sparse gradients; it calls for the loss again.
NOT_HERE = {"SparseAdam", "LBFGS"}
# Optimizers of matrices only.
MATRICES = {"Muon"}

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
CASES = [
    (name, options)
    for name in sorted(KINDS.keys() - NOT_HERE)
    for options in [{}, *OPTIONS.get(name, [])]
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_optimizer_of_dense_gradients(name: str, options: dict[str, Any]) -> None:
    model, plain = twins(mlp())
    with pipeline(model, schedule="zb_h1") as pipe:
        optimizers = []
        for one in (pipe, plain):
            chosen = [p for p in one.parameters() if p.dim() == 2 or name not in MATRICES]
            optimizers.append(KINDS[name](chosen, lr=0.05, **options))  # type: ignore[call-arg]
        for _ in range(3):
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for optimizer in optimizers:
                optimizer.step()
            assert_same(pipe, plain)
            for optimizer in optimizers:
                optimizer.zero_grad()


def test_an_optimizer_that_asks_for_the_loss_again() -> None:
    """LBFGS calls the step as its closure."""
    model, plain = twins(mlp())
    x, y = batch()
    with pipeline(model) as pipe:
        ours = torch.optim.LBFGS(pipe.parameters(), lr=0.1, max_iter=4)
        theirs = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=4)

        def step() -> Tensor:
            ours.zero_grad()
            return pipe.step(x, target=y)

        def plain_step() -> Tensor:
            theirs.zero_grad()
            return plain_loop_step(plain, x, y)

        for _ in range(2):
            assert torch.equal(ours.step(step), theirs.step(plain_step))
            assert_same(pipe, plain)


Make = Callable[[nn.Module], Optimizer]

LOOPS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), lr=0.05), {}),
    "momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), {}),
    "adamw": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), {}),
    "clipping": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), {"clip": 0.05}),
    "accumulation": (lambda m: torch.optim.SGD(m.parameters(), lr=0.05), {"accumulate": 4}),
    "scaler": (lambda m: torch.optim.SGD(m.parameters(), lr=0.05), {"scaler": True}),
    "all": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        {"clip": 0.05, "accumulate": 3, "scaler": True},
    ),
}


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
@pytest.mark.parametrize("name", LOOPS)
def test_twenty_steps_of_the_whole_loop(name: str, schedule: str) -> None:
    """With warm-up and decay of the rate; gradients add up over several batches."""
    make, extras = LOOPS[name]
    model, plain = twins(mlp(8))
    accumulate = extras.get("accumulate", 1)
    both: list[nn.Module] = []
    with pipeline(model, schedule=schedule) as pipe:
        both = [pipe, plain]
        optimizers = [make(one) for one in both]
        warmups = [
            lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 0.1, total_iters=5),
                    lr_scheduler.CosineAnnealingLR(o, 15),
                ],
                [5],
            )
            for o in optimizers
        ]
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled="scaler" in extras) for _ in both
        ]
        for _ in range(20):
            for _ in range(accumulate):
                x, y = batch()
                loss = pipe.step(x, target=y, scaler=scalers[0])
                assert torch.equal(loss, plain_loop_step(plain, x, y, scaler=scalers[1]))
            for one, optimizer, scaler, warmup in zip(
                both, optimizers, scalers, warmups, strict=True
            ):
                scaler.unscale_(optimizer)
                if "clip" in extras:
                    pykern.clip_grad_norm_(one.parameters(), extras["clip"])
                scaler.step(optimizer)
                scaler.update()
                warmup.step()
            assert_same(pipe, plain)
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert warmups[0].get_last_lr() == warmups[1].get_last_lr()


def test_sparse_gradients_are_not_clipped() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"must be dense to be clipped, got layout torch.sparse_c"):
        pykern.clip_grad_norm_(layer.parameters(), 1.0)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "chimera"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_gradients_add_up_over_steps_without_being_rescaled(name: str, steps: int) -> None:
    """Gradients that are in `.grad` before a step are still in it afterwards, whole."""
    model = mlp(8)
    plan = schedules.by_name[name](2, 4)
    given = [batch(8) for _ in range(steps)]
    with pipeline(model.double(), schedule=plan, microbatches=4) as pipe:
        for x, y in given:
            pipe.step(x.double(), target=y.double())
        together = [p.grad for p in pipe.parameters()]
        pipe.zero_grad()
        single: list[list[Tensor]] = []
        for x, y in given:
            pipe.step(x.double(), target=y.double())
            single.append([p.grad for p in pipe.parameters() if p.grad is not None])
            pipe.zero_grad()
    for total, *parts in zip(together, *single, strict=True):
        torch.testing.assert_close(total, sum(parts), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "interleaved"])
def test_an_optimizer_in_the_backward_steps_at_the_last_microbatch(schedule: str) -> None:
    """A hook after accumulation is called once for each microbatch: the last is the one to use."""
    model, plain = twins(mlp(8))
    with pipeline(model, schedule=schedule) as pipe:
        of = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in pipe.parameters()}
        calls = dict.fromkeys(of, 0)

        def update(parameter: Tensor) -> None:
            calls[parameter] += 1  # type: ignore[index]
            if calls[parameter] % 3 == 0:  # type: ignore[index]
                of[parameter].step()  # type: ignore[index]
                of[parameter].zero_grad()  # type: ignore[index]

        for parameter in of:
            parameter.register_post_accumulate_grad_hook(update)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            x, y = batch()
            assert torch.equal(pipe.step(x, target=y), plain_loop_step(plain, x, y))
            optimizer.step()
            optimizer.zero_grad()
            assert_same(pipe, plain)
        assert set(calls.values()) == {9}


def test_an_optimizer_in_the_backward_that_steps_too_early_is_told() -> None:
    """Weights that change under a microbatch in flight would make its gradients wrong."""
    model = mlp()
    with pipeline(model, schedule="gpipe") as pipe:
        for parameter in pipe.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(
                lambda _, optimizer=optimizer: optimizer.step()
            )
        x, y = batch()
        with pytest.raises(RuntimeError, match="change a parameter with its last gradient"):
            pipe.step(x, target=y)
