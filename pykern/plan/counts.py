"""Checks of counts, flags and lists from a caller, before any work starts."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from pykern._C import MAX_CELLS


def require_counts(**counts: int) -> None:
    """Refuses counts that are not whole numbers from 1 to a plan's limit.

    Args:
        **counts: The values under the names that the caller knows them by.

    Raises:
        TypeError: A count is not an int, or is a bool.
        ValueError: A count is below 1 or above 2**24, the most cells of a plan.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if not 1 <= value <= MAX_CELLS:
            raise ValueError(f"{name} must be 1 to {MAX_CELLS}, got {value}")


def require_flags(**flags: bool) -> None:
    """Refuses flags that are not a bool.

    Args:
        **flags: The values under the names that the caller knows them by.

    Raises:
        TypeError: A flag is neither True nor False.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def require_numbers(**numbers: float) -> None:
    """Refuses values that are not numbers.

    Args:
        **numbers: The values under the names that the caller knows them by.

    Raises:
        TypeError: A value is not a number, or is a bool.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")


def require_lists(**lists: Sequence[float] | None) -> None:
    """Refuses values that are neither lists of numbers nor None.

    Args:
        **lists: The values under the names that the caller knows them by.

    Raises:
        TypeError: A value is something else, or one in a list is not a number.
    """
    for name, values in lists.items():
        if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
            raise TypeError(f"{name} must be a list of numbers or None, got {values!r}")
        for value in values or ():
            require_numbers(**{name: value})


def one_for_each(name: str, given: Any, count: int, what: str) -> list[Any]:
    """The values of so many stages, devices or the like, where one value may stand for all.

    Raises:
        ValueError: A list does not have one for each.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    values = list(given) if is_list else [given] * count
    if len(values) != count:
        raise ValueError(
            f"{name} must be one for all, or a list with one for each of {count} {what}, got "
            f"{len(values)}"
        )
    return values
