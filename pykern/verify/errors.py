"""The error for a pipeline that differs from its plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .compare import Difference


@dataclass(frozen=True)
class Divergence:
    """The place where a difference starts.

    Attributes:
        told: the place as a sentence.
        stage: the number of the stage; None if the stage is unknown.
        boundary: the first boundary that differs, as two stage numbers in the direction of the
            tensors: (0, 1) for activations, (1, 0) for gradients. None if all boundaries agree.
        microbatch: the first microbatch that differs there; None if all boundaries agree.
    """

    told: str
    stage: int | None = None
    boundary: tuple[int, int] | None = None
    microbatch: int | None = None


class VerifyError(RuntimeError):
    """A step of the pipeline differs from the plain model run microbatch by microbatch.

    The step itself is complete: gradients, buffers and random numbers come from the pipeline, as
    in a step without verification. The pipeline stays usable.

    Attributes:
        differences: all differences: loss or outputs, gradients, buffers, random numbers.
        first: the difference that the message names, if possible in the stage of the origin.
        stage: the stage number of `first`; None for the loss, outputs and random numbers.
        layer: the layer name of `first`; empty for the loss, outputs and random numbers.
        origin: the place where the difference starts.
    """

    def __init__(
        self,
        summary: str,
        differences: Sequence[Difference],
        first: Difference,
        place: tuple[int, str] | None,
        origin: Divergence,
    ) -> None:
        self.differences = tuple(differences)
        self.first = first
        self.stage = None if place is None else place[0]
        self.layer = "" if place is None else place[1]
        self.origin = origin
        where = "" if place is None else f" (stage {self.stage}, layer {self.layer!r})"
        super().__init__(f"{summary}\n{first}{where}\n{origin.told}")
