"""A benchmark of a box: what a machine does with pykern, in one file that others can compare."""

from .box import run
from .compare import Comparison, compare
from .figures import BoxResults, Figure, load

__all__ = ["BoxResults", "Comparison", "Figure", "compare", "load", "run"]
