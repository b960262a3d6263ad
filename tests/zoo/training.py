"""Layers that train and that do not, dtypes, random numbers, checkpointing within layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from .case import ROWS, WIDTH, Case, linears, mean_square, vectors


class Mlp(nn.Module):
    """Linear layers with an activation between each two."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self.layers
        for layer in layers:
            x = torch.tanh(layer(x))
        return last(x)


class Unused(nn.Module):
    """Parameters that nothing uses, and a module whose result nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(9)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.lost = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == 4:
                self.lost(x)
        return x


class Dropouts(nn.Module):
    """Modules that draw, and a forward that draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)
        self.drops = nn.ModuleList(nn.Dropout(0.3) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, drop) in enumerate(zip(self.layers, self.drops, strict=True)):
            x = drop(torch.relu(layer(x)))
            if number % 3 == 0 and self.training:
                x = F.dropout(x, 0.2) + 0.1 * torch.randn_like(x)
        return x


class Variational(nn.Module):
    """Draws a sample in the middle, and has a loss of its distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = linears(4), linears(4)
        self.mean, self.log_variance = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.into = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        mean, log_variance = self.mean(x), self.log_variance(x)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        x = self.into(z)
        for layer in self.decoder:
            x = torch.tanh(layer(x))
        return x, divergence


class Checkpointed(nn.Module):
    """A layer that computes what is inside once more in its backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class CheckpointNet(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Checkpointed(reentrant=reentrant) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Fourier(nn.Module):
    """Complex weights between a transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(5, 5, dtype=torch.complex64) for _ in range(4))
        self.local = linears(5)

    def forward(self, x: Tensor) -> Tensor:
        for weight, layer in zip(self.weights, self.local, strict=False):
            waves = torch.fft.rfft(layer(x))
            x = torch.fft.irfft(waves @ weight, n=WIDTH) + x
        return self.local[4](x)


class ComplexNet(nn.Module):
    """All of it complex."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.complex128) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(x)
            x = torch.complex(torch.tanh(z.real), torch.sin(z.imag))
        return x


class Parametrized(nn.Module):
    """Weights that are computed from others, with buffers that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.ModuleList(spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.weighted = nn.ModuleList(weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.spectral, *self.weighted):
            x = torch.tanh(layer(x))
        return x


class MixedPrecision(nn.Module):
    """Switches autocast on for a part, and gradients off for another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)
        self.teacher = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = torch.tanh(self.teacher(x))
        for layer in self.layers[:3]:
            x = torch.relu(layer(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[3:6]:
                x = torch.relu(layer(x))
        x = x.float()
        for layer in self.layers[6:]:
            x = layer(x) * taught
        return x


def _frozen(start: int, end: int) -> Case:
    model = Mlp()
    for layer in list(model.layers)[start:end]:
        layer.requires_grad_(False)
    return Case(model, (vectors(),), F.mse_loss, vectors())


def _typed(dtype: torch.dtype) -> Case:
    return Case(Mlp().to(dtype), (vectors().to(dtype),), F.mse_loss, vectors().to(dtype))


def _variational() -> Case:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + 0.1 * output[1].mean()

    return Case(Variational(), (vectors(),), loss, vectors(), draws=True)


def _complex() -> Case:
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex128)
    return Case(ComplexNet(), (x,), mean_square)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(Mlp(), (vectors(),), F.mse_loss, vectors()),
    "frozen_first": lambda: _frozen(0, 4),
    "frozen_middle": lambda: _frozen(3, 6),
    "unused": lambda: Case(Unused(), (vectors(),), F.mse_loss, vectors()),
    "dropout": lambda: Case(Dropouts(), (vectors(),), F.mse_loss, vectors(), draws=True),
    "variational": _variational,
    "checkpoint": lambda: Case(CheckpointNet(reentrant=False), (vectors(),), mean_square),
    "reentrant_checkpoint": lambda: Case(CheckpointNet(reentrant=True), (vectors(),), mean_square),
    "fourier": lambda: Case(Fourier(), (vectors(),), mean_square),
    "complex": _complex,
    "float64": lambda: _typed(torch.float64),
    "bfloat16": lambda: _typed(torch.bfloat16),
    "parametrized": lambda: Case(
        Parametrized(), (vectors(),), mean_square, refuses_replicas="_SpectralNorm"
    ),
    "mixed_precision": lambda: Case(MixedPrecision(), (vectors(),), F.mse_loss, vectors()),
}
