"""Models whose parameters have no shape or no values yet."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.interop.pipelining import SplitPoint, pipeline

X = torch.randn(4, 3)


class Net(nn.Module):
    """A model with a forward of its own."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(first, nn.Tanh())
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(x))
        return y


Take = Callable[[nn.Module | list[nn.Module]], object]


def make(model: nn.Module | list[nn.Module], schedule: str = "gpipe") -> pykern.Pipeline:
    sample = X[:2] if isinstance(model, Net) or schedule == "auto" else None
    return pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss, sample=sample, schedule=schedule
    )


def tune(model: nn.Module | list[nn.Module]) -> object:
    return pykern.tune(model, sample=X, target=X, loss_fn=F.mse_loss, devices="cpu:2")


def estimate(model: nn.Module | list[nn.Module]) -> object:
    return pykern.estimate(model, sample=X, target=X, loss_fn=F.mse_loss, devices=2, microbatches=2)


FORMS: dict[str, tuple[Callable[[nn.Module], nn.Module | list[nn.Module]], str]] = {
    "recorded": (Net, "inner.0."),
    "chain": (lambda first: nn.Sequential(nn.Linear(3, 3), first), "1."),
    "list": (lambda first: [first, nn.Linear(3, 3)], "0."),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("take", [make, tune, estimate])
def test_lazy_parameters_are_refused_by_name(form: str, take: Take) -> None:
    """In a recorded model and in buffers they got torch's own error, about LazyModules."""
    formed, prefix = FORMS[form]
    with pytest.raises(ValueError, match=rf"^{prefix}weight must have a shape, got a lazy one"):
        take(formed(nn.LazyLinear(3)))
    lazy = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(ValueError, match=rf"^{prefix}running_mean must have a shape, got a lazy"):
        take(formed(lazy))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("take", [make, tune, lambda model: make(model, "auto")])
def test_parameters_without_values_are_refused_by_name(form: str, take: Take) -> None:
    """A recorded model had two names for one, and the remedy could not be followed."""
    formed, prefix = FORMS[form]
    message = (
        f"{prefix}weight must be on the CPU or on the pipeline's devices, CPU workers, got meta. "
        "Give it values, by to_empty(device='cpu') and load_state_dict, first"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        take(formed(nn.Linear(3, 3, device="meta")))


def test_lazy_parameters_are_refused_where_torchs_names_are_used() -> None:
    with pytest.raises(ValueError, match=r"^inner\.0\.weight must have a shape, got a lazy one"):
        pipeline(Net(nn.LazyLinear(3)), (X,), split_spec={"last": SplitPoint.BEGINNING})


def test_remedies_work() -> None:
    model = Net(nn.LazyLinear(3))
    model(X)
    expected = model(X)
    empty = Net(nn.Linear(3, 3)).to("meta")
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    for ready in (model, empty):
        with make(ready) as pipe:
            assert torch.equal(pipe(X), expected)


USES: dict[str, Callable[[nn.Module], object]] = {
    "time": lambda model: with_balance(model, "time"),
    "memory": lambda model: with_balance(model, "memory"),
    "auto": lambda model: with_balance(model, "time", schedule="auto"),
    "call": lambda model: make(model)(X),
    "memory of devices": lambda model: make(model).memory(X, target=X),
    "tune": tune,
    "estimate": lambda model: pykern.estimate(
        model,
        sample=X,
        target=X,
        loss_fn=F.mse_loss,
        devices=2,
        microbatches=2,
        with_values=True,
    ),
}


def with_balance(model: nn.Module, balance: Any, **more: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, balance=balance, sample=X[:2], **more
    )


@pytest.mark.parametrize("use", USES)
def test_a_model_made_in_inference_mode_is_refused_where_it_would_train(use: str) -> None:
    """torch's error told of a flag that nobody had set."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"^parameters that train must be made"):
        USES[use](model)
    with torch.inference_mode():
        assert torch.equal(make(model)(X), model(X))
    with_balance(model.requires_grad_(False), "memory")
