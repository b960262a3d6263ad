"""Chains whose stages hand on, or get gradients for, tensors that are not laid out row by row."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 7


class Call(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class Scale(nn.Module):
    """A factor and a shift for each channel of the last dimension: their gradients are sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Attention(nn.Module):
    """Attention whose heads come back transposed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.inward = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = torch.softmax(query @ key.transpose(-1, -2) * 0.3, -1) @ value
        return mixed.transpose(1, 2).flatten(2)


class Modulated(nn.Module):
    """A block of a diffusion transformer: six factors of a condition, chunks of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.condition = nn.Linear(width, 6 * width)
        self.attention = Attention(width, 2)
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, c = given
        parts = self.condition(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + gate2 * self.inner(self.norm(x) * (1 + scale2) + shift2), c


class WithCondition(nn.Module):
    """Patches of an image, and a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.condition = nn.Linear(width, width)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(image).flatten(2).transpose(1, 2)
        return x, self.condition(x.mean(1))


class Classes(nn.Module):
    """A token for each row in front of the others: an expanded parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1)


class Gradients(nn.Module):
    """The rows once more, expanded: all of them lie on each other in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class ConvNext(nn.Module):
    """Channels go last and come back, as in a ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(self.norm(self.depth(x).permute(0, 2, 3, 1)))
        return x + (inner * self.gamma).permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def permuted() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 9, 1),
        Call(lambda x: x.permute(0, 2, 3, 1)),
        Scale(9),
        Call(lambda x: x.transpose(1, 3)),
        nn.Conv2d(9, 9, 3, padding=1),
        Call(lambda x: x.flatten(2).transpose(1, 2)),
        Scale(9),
        nn.Linear(9, 4),
    )


def channels_last() -> nn.Sequential:
    return nn.Sequential(
        Call(_channels_last),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Flatten(2),
        nn.Linear(64, 4),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def convnext() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, stride=2),
        ConvNext(8),
        ConvNext(8),
        nn.AvgPool2d(2),
        ConvNext(8),
        Call(lambda x: x.permute(0, 2, 3, 1)),
        nn.LayerNorm(8),
        nn.Linear(8, 4),
    )


def expanded() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, stride=2),
        Call(lambda x: x.flatten(2).transpose(1, 2)),
        Classes(8),
        Scale(8),
        Gradients(),
        Scale(8),
        Call(lambda x: x[:, 0]),
        Scale(8),
        nn.Linear(8, 4),
        Call(lambda x: x.mean(1)),
    )


def attention() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, stride=2),
        Call(lambda x: x.flatten(2).transpose(1, 2)),
        nn.LayerNorm(8),
        Attention(8, 2),
        Scale(8),
        Attention(8, 4),
        nn.LayerNorm(8),
        Call(lambda x: x.mean(1)),
        nn.Linear(8, 4),
    )


def diffusion() -> nn.Sequential:
    return nn.Sequential(
        WithCondition(8),
        Modulated(8),
        Modulated(8),
        Modulated(8),
        Call(lambda given: given[0].transpose(1, 2).unflatten(-1, (4, 4))),
        nn.Conv2d(8, 4, 1),
        Call(lambda x: x.flatten(2).transpose(1, 2)),
        Scale(4),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "permuted": permuted,
    "channels last": channels_last,
    "convnext": convnext,
    "expanded": expanded,
    "attention": attention,
    "diffusion": diffusion,
}


def inputs() -> Tensor:
    """Float32 [ROWS, 3, 8, 8]."""
    return torch.randn(ROWS, 3, 8, 8)


def loss_of(output: Tensor) -> Tensor:
    """Weights differ from place to place, so that the gradients' sums have something to round."""
    weights = torch.linspace(0.1, 3.0, output[0].numel()).view_as(output[0])
    return (output.square() * weights).mean()


def cuts(count: int) -> Sequence[Sequence[int]]:
    """Every cut into two stages, and the one into stages of one layer."""
    return [*([first, count - first] for first in range(1, count)), [1] * count]
