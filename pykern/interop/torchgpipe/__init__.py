"""torchgpipe's names over pykern's runtime (Kim et al., 2020, arXiv 2004.09910).

A program runs by importing from here: see docs/from-torchgpipe.md.
"""

from . import balance, skip
from .gpipe import BalanceError, GPipe

__all__ = ["BalanceError", "GPipe", "balance", "skip"]
