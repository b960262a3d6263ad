"""The options of verification: the steps and the tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plan import require_counts
from .compare import Bounds


@dataclass(frozen=True)
class Verify:
    """The steps of a pipeline that are compared with the plain model, and the tolerances.

    Two values agree if `abs(ours - plain) <= atol + rtol * abs(plain)`, or both are NaN. With the
    default tolerances of 0 the values must be equal, where 0.0 equals -0.0.

    Args:
        every: n for the first step and every n-th step after it; None for the first step alone.
            Forwards without gradients have a separate count.
        rtol: relative tolerance, at least 0.
        atol: absolute tolerance, at least 0.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    every: int | None = None
    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if self.every is not None:
            require_counts(every=self.every)
        for name in ("rtol", "atol"):
            bound = getattr(self, name)
            if not isinstance(bound, int | float) or isinstance(bound, bool):
                raise TypeError(f"{name} must be a number, got {bound!r}")
            if not 0 <= bound < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {bound!r}")

    @property
    def bounds(self) -> Bounds:
        """The tolerances of the comparison."""
        return Bounds(self.rtol, self.atol)

    def wants(self, number: int) -> bool:
        """Whether the step of this number, from 0, is verified."""
        return number == 0 if self.every is None else number % self.every == 0


def parse_verify(verify: bool | int | Verify) -> Verify | None:
    """The user's argument as a `Verify`; None if verification is off.

    Raises:
        TypeError, ValueError: the argument is wrong.
    """
    if isinstance(verify, bool):
        return Verify() if verify else None
    if isinstance(verify, Verify):
        return verify
    if not isinstance(verify, int) or verify < 1:
        raise (ValueError if isinstance(verify, int) else TypeError)(
            "verify must be True, False, a whole number of at least 1 or a pykern.Verify, got "
            f"{verify!r}"
        )
    return Verify(every=verify)
