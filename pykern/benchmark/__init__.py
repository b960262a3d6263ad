"""A benchmark of a box: what a machine does with pykern, in one file that others can compare.

Files are read and compared without torch, so `run` is imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compare import Comparison, compare
from .figures import BoxResults, Figure, load

if TYPE_CHECKING:
    from .box import run

__all__ = ["BoxResults", "Comparison", "Figure", "compare", "load", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'pykern.benchmark' has no attribute {name!r}")
    return import_module(".box", __name__).run
