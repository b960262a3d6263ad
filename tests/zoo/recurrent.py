"""Recurrences: state passed along, packed sequences, and modules that are called several times."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import ROWS, WIDTH, Case, linears, mean_square, vectors

_LENGTH = 4


class Lstm(nn.Module):
    """Each layer begins with the state in which the one before has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(5))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y, state = layer(x, state)
            x = x + norm(y)
        assert state is not None
        return self.head(torch.cat([x[:, -1], state[1][0]], dim=-1))


class Packed(nn.Module):
    """Packs sequences of several lengths, runs them, and unpacks them."""

    def __init__(self, width: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(width, WIDTH, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.gru(packed)
        return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]


class PackedGru(nn.Module):
    """Recurrences over packed sequences, with layers between that see them padded."""

    def __init__(self) -> None:
        super().__init__()
        self.into = linears(4)
        self.first = Packed(WIDTH, bidirectional=True)
        self.middle = linears(2, 2 * WIDTH)
        self.second = Packed(2 * WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.into:
            x = torch.tanh(layer(x))
        x = self.first(x, lengths)
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.head(self.second(x, lengths).sum(1))


class Cells(nn.Module):
    """A cell is called for every step of time, one layer after another."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = list(x.unbind(1))
        for cell in self.cells:
            state = torch.zeros_like(steps[0])
            for number, step in enumerate(steps):
                state = cell(step, state)
                steps[number] = state
        return self.head(steps[-1])


class Fixpoint(nn.Module):
    """A layer is called three times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.into = linears(4)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.behind = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.into:
            x = torch.sin(layer(x))
        start = x
        for _ in range(3):
            x = start + torch.tanh(self.again(x))
        for layer in self.behind:
            x = torch.sin(layer(x))
        return x


class Siamese(nn.Module):
    """Two inputs go through one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
        self.compare = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.head = linears(6)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        x = self.compare(self.tower(one), self.tower(other))
        for layer in self.head:
            x = x + torch.relu(layer(x))
        return x.sum(-1)


class Universal(nn.Module):
    """One block, time and again, in whatever stage it is."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for depth in range(7):
            x = x + torch.tanh(self.block(x)) / (depth + 1)
        return self.head(x)


def _packed_gru() -> Case:
    lengths = torch.arange(ROWS) % _LENGTH + 1
    starts = [*(f"into.{n}" for n in range(4)), "first", "middle.0", "middle.1", "second", "head"]
    return Case(PackedGru(), (vectors(_LENGTH, WIDTH), lengths), mean_square, starts=starts)


def _lstm() -> Case:
    labels = torch.randint(3, (ROWS,))
    return Case(Lstm(), (vectors(_LENGTH, WIDTH),), F.cross_entropy, labels)


def _siamese() -> Case:
    starts = ["tower", "compare", *(f"head.{number}" for number in range(6))]
    labels = (vectors(1)[:, 0] > 0).float()
    loss = F.binary_cross_entropy_with_logits
    return Case(Siamese(), (vectors(), vectors()), loss, labels, starts=starts)


def _fixpoint() -> Case:
    starts = [*(f"into.{n}" for n in range(4)), "again", *(f"behind.{n}" for n in range(4))]
    return Case(Fixpoint(), (vectors(),), F.mse_loss, vectors(), starts=starts)


def _cells() -> Case:
    starts = [f"cells.{number}" for number in range(8)]
    return Case(Cells(), (vectors(3, WIDTH),), mean_square, starts=starts)


CASES: dict[str, Callable[[], Case]] = {
    "lstm": _lstm,
    "packed_gru": _packed_gru,
    "cells": _cells,
    "fixpoint": _fixpoint,
    "siamese": _siamese,
    "siamese_apart": lambda: replace(_siamese(), starts=(), ties=True),
    "universal": lambda: Case(
        Universal(), (vectors(),), F.mse_loss, vectors(), draws=True, ties=True
    ),
}
