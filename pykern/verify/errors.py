"""The error of a pipeline that does something else than its plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .compare import Difference


@dataclass(frozen=True)
class Origin:
    """Where a difference starts.

    Attributes:
        told: a sentence.
        stage: in which stage; None where that could not be found.
        boundary: the first boundary behind it, as the numbers of the two stages in the direction of
            what crosses: (0, 1) for activations, (1, 0) for gradients. None where all agree.
        microbatch: the first there; None where all boundaries agree.
    """

    told: str
    stage: int | None = None
    boundary: tuple[int, int] | None = None
    microbatch: int | None = None


class VerifyError(RuntimeError):
    """A step of the pipeline differs from the plain model run microbatch by microbatch.

    The step itself is complete: gradients, buffers and random numbers are the pipeline's, as if it
    had not been verified, and the pipeline can be used.

    Attributes:
        differences: all of them: loss or outputs, gradients, buffers, random numbers.
        first: the one that the message names: of the stage where it starts, if any is.
        stage: the number of the first's stage; None for the loss, outputs and random numbers.
        layer: the name of the first's layer; empty likewise.
        origin: where it starts.
    """

    def __init__(
        self,
        summary: str,
        differences: Sequence[Difference],
        first: Difference,
        place: tuple[int, str] | None,
        origin: Origin,
    ) -> None:
        self.differences = tuple(differences)
        self.first = first
        self.stage = None if place is None else place[0]
        self.layer = "" if place is None else place[1]
        self.origin = origin
        where = "" if place is None else f" (stage {self.stage}, layer {self.layer!r})"
        super().__init__(f"{summary}\n{first}{where}\n{origin.told}")
