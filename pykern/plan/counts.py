"""Checks of counts and flags from a caller, before any work starts."""

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
