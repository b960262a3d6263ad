"""A model as a chain of layers, cut into stages.

`bottleneck` and `unequal` need no torch, so the names that do are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .balance import Balance, Partition, partition

__all__ = ["Balance", "Partition", "partition"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pykern.partition' has no attribute {name!r}")
    return getattr(import_module(".balance", __name__), name)
