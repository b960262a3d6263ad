"""The cells that every run checks of a matrix, all of which are run at night."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """A parameter set that `pytest -m nightly` runs, and no other."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """All cells of the matrix, in order; those off its diagonal are for the night.

    The diagonal begins again where an axis ends, so every value of every axis is on it.
    """
    sides = [list(axis) for axis in axes]
    length = max(map(len, sides))
    on = {tuple(index % len(side) for side in sides) for index in range(length)}
    cells = product(*(enumerate(side) for side in sides))
    return [
        values if places in on else nightly(*values)
        for places, values in (zip(*cell, strict=True) for cell in cells)
    ]
