"""The table of features: a row for each test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., None])

# Whom docs/features.md compares with, and the versions that were looked at.
PEERS = {
    "torch": "torch.distributed.pipelining 2.13, with torchtitan where it adds a feature",
    "torchgpipe": "torchgpipe 0.0.7 and fairscale 0.4.13",
    "DeepSpeed": "DeepSpeed 0.19.6",
    "Megatron": "Megatron-LM, main of August 2026",
    "DualPipe": "DualPipe, March 2025",
    "zero-bubble": "the zero-bubble fork of Megatron, May 2025",
}
_WORDS = {
    "y": "yes",
    "p": "partly",
    "n": "no",
    "?": "unknown",
    "own": "its own",
    "user": "by hand",
    "titan": "with torchtitan",
}


@dataclass(frozen=True)
class Row:
    """A feature, the test that shows it here, and who else has it.

    Attributes:
        feature: what a user asks for.
        file: the module that the test is in.
        test: its name.
        peers: what is said of each of `PEERS`, in their order.
    """

    feature: str
    file: str
    test: str
    peers: tuple[str, ...]


ROWS: list[Row] = []


def row(feature: str, peers: str) -> Callable[[_F], _F]:
    """Makes a test a row. `peers` has a letter or word for each, as in `_WORDS`, or a number."""

    def add(test: _F) -> _F:
        found = tuple(_WORDS.get(word, word.replace("_", " ")) for word in peers.split())
        assert len(found) == len(PEERS), feature
        ROWS.append(Row(feature, test.__module__, test.__name__, found))
        return test

    return add


def markdown() -> str:
    """The table as docs/features.md shows it."""
    lines = ["| feature | shown by | " + " | ".join(PEERS) + " |", "|---" * (len(PEERS) + 2) + "|"]
    # Whichever file was imported first.
    for one in sorted(ROWS, key=lambda one: one.file, reverse=True):
        lines.append(f"| {one.feature} | `{one.test}` | " + " | ".join(one.peers) + " |")
    return "\n".join(lines) + "\n"
