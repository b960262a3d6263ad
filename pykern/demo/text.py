"""The demo's data: bytes of real text, cut into windows in an order that is always the same."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .files import require_text_file

MAX_BYTES = 4_000_000
HELD_OUT_SHARE = 1 / 16


@dataclass(frozen=True)
class Corpus:
    """Text in two parts that share no byte.

    Attributes:
        training: [bytes], uint8: the first part of the text.
        held_out: [bytes], uint8: the rest, never trained on.
        source: Where the text is from, for people.
    """

    training: Tensor
    held_out: Tensor
    source: str


def standard_library(window: int) -> Corpus:
    """The source of the running Python's own top-level modules, in order of name.

    Args:
        window: Bytes that one training example needs.

    Returns:
        At most `MAX_BYTES` of it.

    Raises:
        ValueError: If this Python carries no source, or too little.
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return _corpus(bytes(text[:MAX_BYTES]), "the Python standard library", window)


def text_file(path: Path, window: int) -> Corpus:
    """The user's own text.

    Args:
        path: A regular file; of a longer one the first `MAX_BYTES` are read.
        window: Bytes that one training example needs.

    Returns:
        The text, in any encoding that keeps its bytes free of NUL.

    Raises:
        ValueError: If it is not a regular file, is binary, or is too short.
        OSError: If it cannot be read.
    """
    require_text_file(path)
    with path.open("rb") as file:
        text = file.read(MAX_BYTES)
    if (position := text.find(0)) >= 0:
        raise ValueError(
            f"path must be a text file, got {path}, which is binary (byte 0 at offset {position})"
        )
    return _corpus(text, str(path), window)


def _corpus(text: bytes, source: str, window: int) -> Corpus:
    needed = round(window / HELD_OUT_SHARE)
    if len(text) < needed:
        raise ValueError(f"{source} must have at least {needed} bytes of text, got {len(text)}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    num_training = len(text) - round(len(text) * HELD_OUT_SHARE)
    return Corpus(data[:num_training], data[num_training:], source)


def batches(text: Tensor, batch: int, window: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows without end; the same seed gives the same windows in the same order.

    Args:
        text: [bytes], uint8, at least one window long.
        batch: Windows per batch.
        window: Bytes per window; the model sees all but the last and predicts all but the first.
        seed: Seed of the choice.

    Yields:
        Input and target, each [batch, window - 1], int64.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - window + 1, (batch,), generator=generator)
        yield _windows(text, starts, window)


def even_windows(text: Tensor, count: int, window: int) -> tuple[Tensor, Tensor]:
    """Input and target of `count` windows spread evenly over the text, each [count, window - 1]."""
    starts = torch.linspace(0, len(text) - window, count).long()
    return _windows(text, starts, window)


def _windows(text: Tensor, starts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(window)].long()
    return rows[:, :-1], rows[:, 1:]
