"""Classes with a `__call__` of their own, and forwards that write parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import CutError

WIDTH, MICROBATCHES = 8, 4


class Scaled(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = super().__call__(x) * 2
        return y


class Again(Scaled):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


class Renormalised(nn.Linear):
    """Keeps its weight within a norm, as EEGNet does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Within(nn.Module):
    """The writes are in the stage of the layer."""

    def __init__(self, kind: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, max_norm=0.5)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.embedding(x))
        return y


class ByFunction(Embedded):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.embedding(x, self.embedding.weight, max_norm=0.5))
        return y


def _rows(*kinds: type[nn.Module]) -> list[Any]:
    return [pytest.param(lambda kind=kind: Within(kind), id=kind.__name__) for kind in kinds]


@pytest.mark.parametrize("options", [{}, {"recompute": "layer"}, {"schedule": "zb_h1"}])
@pytest.mark.parametrize("make", [*_rows(Scaled, Again, Renormalised), Embedded, ByFunction])
def test_every_bit_is_the_plain_models(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    x = torch.randn(8, WIDTH)
    given = torch.randint(5, (8,)) if isinstance(model, Embedded) else x
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        sample=given[:2],
        **options,
    ) as pipe:
        for _ in range(3):
            pipe.step(given, target=x)
            for part, target in zip(given.chunk(MICROBATCHES), x.chunk(MICROBATCHES), strict=True):
                (F.mse_loss(plain(part), target) / MICROBATCHES).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Elsewhere(Within):
    """The writes are in the first stage, and the layer is in the last one."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.last.weight.data.mul_(0.9)
        z: Tensor = self.last(self.middle(y))
        return z


class BufferElsewhere(Within):
    def __init__(self) -> None:
        super().__init__(lambda *_: nn.BatchNorm1d(WIDTH, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        norm: Any = self.middle
        with torch.no_grad():
            norm.running_mean.mul_(0.5)
        z: Tensor = self.last(norm(y))
        return z


@pytest.mark.parametrize(
    ("kind", "name"), [(Elsewhere, "last.weight"), (BufferElsewhere, "middle.running_mean")]
)
def test_a_write_to_what_another_stage_uses_is_refused(kind: type[Within], name: str) -> None:
    model, x = kind(), torch.randn(2, WIDTH)
    layer = name.partition(".")[0]
    with pytest.raises(CutError, match=rf"writes {name}, and {layer} uses it, in stages 1 and 0"):
        pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=x, split_at=["middle"])


def test_a_recording_leaves_parameters_as_they_were() -> None:
    model = Within(Renormalised)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = [parameter.data_ptr() for parameter in model.parameters()]
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=torch.randn(2, WIDTH)):
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
    assert [parameter.data_ptr() for parameter in model.parameters()] == held


class Transformed(Within):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.vmap(self.middle)(self.first(x)))
        return y


def test_a_transform_in_a_forward_that_is_cut_is_named() -> None:
    with pytest.raises(CutError, match=r"test_own_calls\.py:\d+ calls middle within a transform"):
        pykern.Pipeline(
            Transformed(), devices="cpu:2", microbatches=2, sample=torch.randn(2, WIDTH)
        )


def test_a_recording_leaves_classes_as_they_were() -> None:
    def calls() -> list[Any]:
        of_kinds = [vars(kind)["__call__"] for kind in (Again, Scaled, nn.Module)]
        return [*of_kinds, vars(torch.autograd.Function)["apply"]]

    before, x = calls(), torch.randn(2, WIDTH)
    with pykern.Pipeline(Within(Again), devices="cpu:2", microbatches=2, sample=x):
        assert calls() == before
