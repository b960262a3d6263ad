"""Convolutions: branches, skips over many stages, running statistics."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import ROWS, Case, mean_square, vectors

_STATISTICS = "BatchNorm2d"


class ConvNet(nn.Module):
    """Batch normalisation, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, 4, 3, padding=1) for i in (3, 4, 4, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return self.head(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions and what came in, added in place."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.down = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(ResidualBlock(4, 4), ResidualBlock(4, 4))
        self.layer2 = nn.Sequential(ResidualBlock(4, 6), ResidualBlock(6, 6))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.head(torch.flatten(self.pool(x), 1))


class UNet(nn.Module):
    """Values from the way down are joined again on the way up, the first with the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, 4, 3, padding=1) for i in (2, 4, 4, 4))
        self.middle = nn.Conv2d(4, 4, 1)
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(4))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = F.silu(layer(torch.cat([x, skips.pop()], 1)))
        return self.head(x)


class Inception(nn.Module):
    """Branches that are joined, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.ModuleList(nn.Conv2d(i, 2, 1) for i in (3, 6, 6))
        self.squares = nn.ModuleList(nn.Conv2d(i, 2, 3, padding=1) for i in (3, 6, 6))
        self.pooled = nn.ModuleList(nn.Conv2d(i, 2, 1) for i in (3, 6, 6))
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for point, square, pooled in zip(self.points, self.squares, self.pooled, strict=True):
            branches = [point(x), square(x), pooled(self.pool(x))]
            x = F.gelu(torch.cat(branches, dim=1))
        return self.head(x.amax((2, 3)))


class DenseNet(nn.Module):
    """Every layer is given what all before it have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2 * i, 2, 3, padding=1) for i in range(1, 9))
        self.head = nn.Conv2d(18, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1))


class AutoEncoder(nn.Module):
    """Group normalisation, transposed convolutions, and the input once more in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Conv2d(i, 4, 2, stride=2) for i in (2, 4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(4))
        self.slopes = nn.ModuleList(nn.PReLU(4) for _ in range(2))
        self.decoder = nn.ModuleList(nn.ConvTranspose2d(4, 4, 2, stride=2) for _ in range(2))
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for number, layer in enumerate(self.encoder):
            y = self.slopes[number](self.norms[number](layer(y)))
        for number, layer in enumerate(self.decoder):
            y = self.norms[2 + number](layer(y)).sin()
        return self.out(y), x


def _reconstruction(output: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(*output)


def _labelled(model: Callable[[], nn.Module], refuses: str | None = None) -> Case:
    labels = torch.randint(5, (ROWS,))
    return Case(model(), (vectors(3, 4, 4),), F.cross_entropy, labels, refuses_replicas=refuses)


CASES: dict[str, Callable[[], Case]] = {
    "conv_net": lambda: _labelled(ConvNet, _STATISTICS),
    "res_net": lambda: _labelled(ResNet, _STATISTICS),
    "u_net": lambda: Case(UNet(), (vectors(2, 4, 4),), F.l1_loss, vectors(2, 4, 4)),
    "inception": lambda: _labelled(Inception),
    "dense_net": lambda: Case(DenseNet(), (vectors(2, 4, 4),), mean_square),
    "auto_encoder": lambda: Case(AutoEncoder(), (vectors(2, 4, 4),), _reconstruction),
}
