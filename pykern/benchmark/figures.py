"""Measured figures, and the file that keeps them. It holds no name of a host, user or folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..replacing import replacing

FORMAT = "pykern box benchmark 1"


@dataclass(frozen=True)
class Figure:
    """One measured time; less is better.

    Attributes:
        name: The measured thing, under the same name on every box.
        unit: `ms`, or `us` of an action.
        samples: In the order in which they were taken.
        predicted: The time by simulation; None for a figure that is not simulated.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    predicted: float | None = None

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        """The 20th and the 80th percentile of the samples."""
        return interval_of(self.samples)


@dataclass(frozen=True)
class BoxResults:
    """All that one run has found.

    Attributes:
        machine: Facts of the box by name: versions, processors, GPUs and the date.
        figures: By section, in their order.
        left_out: By section, why it did not run, or not to its end.
    """

    machine: Mapping[str, str]
    figures: tuple[Figure, ...]
    left_out: Mapping[str, str]

    def text(self) -> str:
        """The content of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the file, at once or not at all."""
        with replacing(Path(path)) as file:
            file.write_text(self.text(), encoding="utf-8")


def load(path: str | Path) -> BoxResults:
    """Reads a file that `BoxResults.save` has written.

    Raises:
        ValueError: the file is another's, or a part of it is missing or of another kind.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must be a file of pykern bench, got other text: {error}"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        told = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path} must have the format {FORMAT!r}, got {told!r}. Make it again")
    try:
        return BoxResults(
            _texts(found, "machine"),
            tuple(_figure(one) for one in found["figures"]),
            _texts(found, "left_out"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} must be whole, got a file without {error}") from None


def interval_of(samples: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile of at least two samples."""
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return cuts[0], cuts[-1]


def _figure(found: Any) -> Figure:
    samples = tuple(float(sample) for sample in found["samples"])
    if len(samples) < 2 or not all(math.isfinite(one) and one > 0 for one in samples):
        raise ValueError(
            f"samples of {found['name']!r} must be two or more times above 0, got {samples}"
        )
    predicted = found["predicted"]
    return Figure(
        str(found["name"]),
        str(found["unit"]),
        samples,
        None if predicted is None else float(predicted),
    )


def _texts(found: Mapping[str, Any], name: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in dict(found[name]).items()}
