"""Small models with a forward of their own whose values skip stages, with a loss and data."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.support.plain_step import Seed, by_microbatch, rows_of

WIDTH = 6


@dataclass
class Skips:
    """A model, its arguments by name, one row per sample, and a loss."""

    model: nn.Module
    inputs: dict[str, Any]
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor] = F.mse_loss


class UNet(nn.Module):
    """Blocks going down, each of whose outputs the block at its height going up uses twice."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for block in self.down:
            x = torch.tanh(block(x))
            held.append(x)
        for block in self.up:
            skip = held.pop()
            x = x * torch.sigmoid(skip) + block(skip)
        return x


class Dense(nn.Module):
    """Every block uses the outputs of all before it, the first one's several times."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for number, block in enumerate(self.blocks):
            total = made[0] * 0.5
            for value in made:
                total = total + torch.sin(value * (number + 1.1))
            made.append(block(total) * torch.cos(made[min(1, number)]))
        return made[-1]


class Ladder(nn.Module):
    """Every block uses the output of the one before it, and of the fourth before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for block in self.blocks:
            made.append(torch.tanh(block(made[-1])) * made[max(0, len(made) - 4)])
        return made[-1]


class Wide(nn.Module):
    """The last of four stages alone uses `late`, and the value that the first has put aside, 7
    wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.aside = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        skip = self.aside(x)
        x = torch.tanh(self.third(torch.tanh(self.second(x))))
        return x * torch.sin(self.last(skip)) * late.sum(-1, keepdim=True)


class Cross(nn.Module):
    """A block of a decoder: attention to itself and to what the encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x = x + torch.tanh(self.own(x))
        keys, values = self.memory(memory).chunk(2, -1)
        attended = F.scaled_dot_product_attention(self.query(x), keys, values, mask[:, None])
        return x + attended


class EncoderDecoder(nn.Module):
    """The decoder's input and both masks come late, the encoder's result is used by all blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.decoder = nn.ModuleList(Cross() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, wanted: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        for block in self.encoder:
            source = source + torch.tanh(block(source))
        for block in self.decoder:
            wanted = block(wanted, source, mask)
        return self.head(wanted) * weights[..., None]


def unet(rows: int, depth: int = 8) -> Skips:
    x, y = torch.randn(2, rows, WIDTH)
    return Skips(UNet(-(-depth // 2)), {"x": x}, y)


def dense(rows: int, depth: int = 8) -> Skips:
    x, y = torch.randn(2, rows, WIDTH)
    return Skips(Dense(depth), {"x": x}, y)


def ladder(rows: int, depth: int = 8) -> Skips:
    x, y = torch.randn(2, rows, WIDTH)
    return Skips(Ladder(depth), {"x": x}, y)


def wide(rows: int) -> Skips:
    x, y = torch.randn(2, rows, WIDTH)
    return Skips(Wide(), {"x": x, "late": torch.randn(rows, 9)}, y)


def encoder_decoder(rows: int, depth: int = 8) -> Skips:
    inputs = {
        "source": torch.randn(rows, 5, WIDTH),
        "wanted": torch.randn(rows, 3, WIDTH),
        "mask": torch.rand(rows, 5) > -1.0,
        "weights": torch.rand(rows, 3),
    }
    return Skips(EncoderDecoder(-(-depth // 2)), inputs, torch.randn(rows, 3, WIDTH))


# Each gets the rows of its batch, and about how many blocks there are to be.
MODELS: dict[str, Callable[..., Skips]] = {
    "unet": unet,
    "dense": dense,
    "ladder": ladder,
    "encoder_decoder": encoder_decoder,
}


def pipeline(
    case: Skips, plan: Any, devices: Any, split_at: Any = None, **options: Any
) -> pykern.Pipeline:
    rows = -(-len(case.target) // plan.num_microbatches)
    sample = {name: value[:rows] for name, value in case.inputs.items()}
    return pykern.Pipeline(
        case.model,
        devices=devices,
        schedule=plan,
        loss_fn=case.loss_fn,
        sample=sample,
        split_at=split_at,
        balance=None if split_at else "layers",
        **options,
    )


def plain_step(model: nn.Module, case: Skips, num_microbatches: int, replicas: int = 1) -> Tensor:
    """Loss of the batch, microbatch by microbatch; gradients are added to `.grad`."""
    rows = rows_of(len(case.target), num_microbatches)
    columns = {name: value.split(rows) for name, value in case.inputs.items()}
    targets = case.target.split(rows)

    def loss_of(index: int, _: Seed) -> Tensor:
        inputs = {name: parts[index] for name, parts in columns.items()}
        return case.loss_fn(model(**inputs), targets[index])

    return by_microbatch(model, rows, loss_of, replicas)


def plain_output(model: nn.Module, case: Skips, num_microbatches: int) -> Tensor:
    """The outputs of the model for the batch, microbatch by microbatch."""
    rows = rows_of(len(case.target), num_microbatches)
    columns: Sequence[Any] = [value.split(rows) for value in case.inputs.values()]
    with torch.no_grad():
        parts = [model(*part) for part in zip(*columns, strict=True)]
    return torch.cat(parts)


def twin_of(case: Skips) -> nn.Module:
    """A copy of the model, for the plain steps."""
    return copy.deepcopy(case.model)
