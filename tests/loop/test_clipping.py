"""Clipping by the gradients' norm: torch's, and the one whose order nothing changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.fake_cuda.fake import FakeCuda
from tests.loop.loops import assert_same, batch, mlp, pipeline, plain_loop_step, twins

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


def ulps(ours: Tensor, theirs: Tensor) -> int:
    """How many numbers of float32 lie between two positive tensors, at most."""
    return int((ours.view(torch.int32) - theirs.view(torch.int32)).abs().max())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_own_clipping_is_within_one_unit_in_the_last_place(name: str) -> None:
    model, plain = twins(mlp())
    kind, options = OPTIMIZERS[name]
    with pipeline(model) as pipe:
        optimizers = [kind(m.parameters(), **options) for m in (pipe, plain)]
        for _ in range(4):
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (pipe, plain)]
            assert ulps(*norms) <= 1
            for parameter, twin in zip(pipe.parameters(), plain.parameters(), strict=True):
                assert parameter.grad is not None
                assert twin.grad is not None
                assert ulps(parameter.grad.abs(), twin.grad.abs()) <= 1
                # The next step starts from the same numbers.
                parameter.grad.copy_(twin.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, torch.inf])
def test_the_canonical_norm_is_that_of_all_gradients(order: float) -> None:
    model = mlp()
    plain_loop_step(model, *batch())

    def gradients() -> Tensor:
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    before = gradients()
    total = pykern.clip_grad_norm_(model.parameters(), 0.05, order)
    torch.testing.assert_close(total, torch.linalg.vector_norm(before, order))
    assert torch.linalg.vector_norm(gradients(), order) <= 0.05
    torch.testing.assert_close(gradients(), before * (0.05 / total), rtol=1e-4, atol=1e-8)


def test_the_largest_gradient_is_named_as_for_torch() -> None:
    model = mlp()
    plain_loop_step(model, *batch())
    name: Any = "inf"
    norm = pykern.clip_grad_norm_(model.parameters(), 1e6, name)
    assert norm == nn.utils.clip_grad_norm_(model.parameters(), 1e6, name)


def test_a_norm_below_the_limit_changes_nothing() -> None:
    model, plain = twins(mlp())
    x, y = batch()
    plain_loop_step(model, x, y)
    plain_loop_step(plain, x, y)
    pykern.clip_grad_norm_(model.parameters(), 1e6)
    assert_same(model, plain)


@pytest.mark.parametrize(("stages", "schedule"), [(1, "gpipe"), (3, "one_f_one_b"), (4, "zb_h1")])
def test_the_canonical_norm_has_the_same_bits_on_any_number_of_stages(
    stages: int, schedule: str
) -> None:
    model, plain = twins(mlp())
    with pipeline(model, devices=f"cpu:{stages}", schedule=schedule) as pipe:
        for _ in range(3):
            x, y = batch()
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            ours, theirs = (pykern.clip_grad_norm_(m.parameters(), 0.01) for m in (pipe, plain))
            assert torch.equal(ours, theirs)
            assert_same(pipe, plain)


def test_parameters_of_several_devices_and_types_are_combined_in_their_order(
    gpus: FakeCuda,
) -> None:
    """Grouped by type, the norms of these would be added in another order."""
    model = mlp()
    for number, layer in enumerate(model):
        layer.to([torch.float64, torch.float32, torch.bfloat16][number % 3])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    norms: list[Tensor] = []
    for parameter in model.parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(parameter.grad, dtype=wide).double())
    expected = torch.linalg.vector_norm(torch.stack(norms))
    here = pykern.clip_grad_norm_(list(model.parameters()), 0.5)
    assert torch.equal(here, expected)


def test_edges() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert pykern.clip_grad_norm_(weight, 1.0) == 0
    weight.grad = torch.tensor([1.0, torch.inf, 1.0])
    with pytest.raises(RuntimeError, match="must be finite to clip by it, got inf"):
        pykern.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert torch.equal(weight.grad, torch.tensor([1.0, torch.inf, 1.0]))
    assert pykern.clip_grad_norm_([weight], 1.0) == torch.inf
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be at least 0"):
            pykern.clip_grad_norm_(weight, wrong)
