"""Layers that are hard to repeat: what they do is not in what they are given and return."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pykern.kernels.dropout import dropout
from tests.support.notes import Notes


class Written(nn.Module):
    """Writes into what it is given, and does not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Tied(nn.Module):
    """A layer with the parameters of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.sin(), self.other.weight)


class Aside:
    """Where a layer leaves something for another."""

    value: Tensor


class Leaves(nn.Linear):
    def __init__(self, aside: Aside) -> None:
        super().__init__(6, 6)
        self.aside = [aside]

    def forward(self, x: Tensor) -> Tensor:
        self.aside[0].value = y = super().forward(x)
        return y.cos()


class LeavesMask(nn.Linear):
    """Leaves aside what needs no gradient."""

    def __init__(self, aside: Aside) -> None:
        super().__init__(6, 6)
        self.aside = [aside]

    def forward(self, x: Tensor) -> Tensor:
        self.aside[0].value = (x > 0).float()
        return super().forward(x)


class Finds(nn.Linear):
    def __init__(self, aside: Aside) -> None:
        super().__init__(6, 6)
        self.aside = [aside]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.aside[0].value


class Average(nn.Module):
    """Keeps an average as another buffer each time, and uses it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Noise(nn.Module):
    """Draws from a generator of its own, and from the default one, as torch does and as we do."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.rand(x.shape, generator=self.generator)
        return dropout(F.dropout(x * own, 0.3) + torch.rand_like(x), 0.2)

    def __deepcopy__(self, _: Any) -> "Noise":
        return Noise()


class Modes(nn.Linear):
    """Switches autocast and gradients within itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = super().forward(x)
        with torch.no_grad():
            scale = x.abs().mean()
        assert torch.is_grad_enabled()
        return y.float() * scale + x.tanh()


class Derivative(nn.Linear):
    """Uses a transform that refuses hooks of saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        sines = torch.func.vmap(torch.func.grad(torch.sin))(x.detach().flatten())
        return super().forward(x) * sines.view_as(x)


class Passes(nn.Module):
    """Passes its parameter on with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Uses(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] @ parts[1].sin()


class Opaque:
    """A container in which torch does not look for tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(nn.Linear):
    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class Unwraps(nn.Linear):
    def forward(self, wrapped: Opaque) -> Tensor:  # type: ignore[override]
        return super().forward(wrapped.x.sin())


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def tied() -> list[nn.Module]:
    first = linear()
    return [first, nn.Tanh(), Tied(first), nn.Dropout(0.3), linear()]


def aside() -> list[nn.Module]:
    shared = Aside()
    return [linear(), Leaves(shared), nn.Tanh(), Finds(shared), linear()]


def mask() -> list[nn.Module]:
    shared = Aside()
    return [linear(), LeavesMask(shared), nn.Tanh(), Finds(shared), linear(), Finds(shared)]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "writes": lambda: [linear(), Written(), nn.Identity(), nn.ReLU(inplace=True), linear()],
    "tied": tied,
    "aside": aside,
    "mask": mask,
    "spectral norm": lambda: [spectral_norm(linear()), nn.Tanh(), spectral_norm(linear())],
    "average": lambda: [linear(), Average(), linear(), nn.BatchNorm1d(6)],
    "noise": lambda: [linear(), Noise(), linear(), nn.Dropout(0.5), Noise(), linear()],
    "modes": lambda: [Modes(6, 6), Modes(6, 6), linear()],
    "derivative": lambda: [linear(), Derivative(6, 6), linear()],
    "wraps": lambda: [linear(), Wraps(6, 6), Unwraps(6, 6), linear(), nn.Tanh(), linear()],
    "passes": lambda: [linear(), Passes(), Uses(), Passes(), Uses()],
}


class Threads(nn.Linear):
    """Notes how many threads torch has in its forward."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.notes = Notes()

    @property
    def seen(self) -> set[int]:
        return self.notes.seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.get_num_threads())
        y: Tensor = super().forward(x)
        return y
