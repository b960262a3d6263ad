"""Notes of layers that stay when measurements put the state of layers back."""

from typing import Any


class Notes:
    """Has no `__dict__`, so that nothing looks into it."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: set[Any] = set()
