"""Measured figures, and the file that keeps them. It holds no name of a host, user or folder."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from ..plan.files import read_bytes, write_text
from ..plan.files.strict_json import decoded
from ..plan.files.typed_json import from_text

FORMAT = "pykern box benchmark 1"


@dataclass(frozen=True)
class Figure:
    """One measured time; less is better.

    Attributes:
        name: The measured thing, under the same name on every box.
        unit: `ms`, or `us` of an action.
        samples: In the order in which they were taken.
        predicted: The time by simulation; None for a figure that is not simulated.

    Raises:
        ValueError: There are fewer than two samples, or one is not a time.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    predicted: float | None = None

    def __post_init__(self) -> None:
        if len(self.samples) < 2 or not all(isfinite(one) and one > 0 for one in self.samples):
            raise ValueError(
                f"samples of {self.name!r} must be two or more times above 0, got {self.samples}"
            )

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        """The 20th and the 80th percentile of the samples."""
        return interval_of(self.samples)


class CannotRunHere(ValueError):
    """A section has nothing to measure on these devices. Its text names no user, host or folder."""


@dataclass(frozen=True)
class BoxResults:
    """All that one run has found.

    Attributes:
        machine: Facts of the box by name: versions, processors, GPUs and the date.
        figures: By section, in their order.
        left_out: By section, why it did not run, or not to its end.
        format: The form of the file.

    Raises:
        ValueError: The form is another.
    """

    machine: Mapping[str, str]
    figures: tuple[Figure, ...]
    left_out: Mapping[str, str]
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {self.format!r}")

    def text(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, at once or not at all."""
        write_text(Path(path), self.text())


def load(path: str | os.PathLike[str]) -> BoxResults:
    """Reads a file that `BoxResults.save` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is another's, or a part of it is missing or of another kind.
    """
    try:
        return from_text(BoxResults, decoded(read_bytes(Path(path))))
    except ValueError as error:
        raise ValueError(
            f"{path} must be a file of pykern bench box, got another file: {error}"
        ) from error


def interval_of(samples: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile of at least two samples."""
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return cuts[0], cuts[-1]
