"""Arguments of modules of which nothing is known, such as caches, and tensors left in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..tensors.trees import leaves_of
from ..user_code import user_line
from .errors import CutError
from .values import PLAIN


def foreign_in(tree: Any) -> list[Any]:
    """The arguments of a tree of which nothing is known."""
    known = (Tensor, nn.Module, type, *PLAIN)
    return [leaf for leaf in leaves_of(tree) if not isinstance(leaf, known)]


def refuse_filled(arguments: Iterable[Any], name: str) -> None:
    """Refuses those in which the module of this name has left tensors.

    Raises:
        CutError: there is one.
    """
    for one in arguments:
        if _holds_tensors(one):
            raise CutError(
                f"{name} is given a {type(one).__name__} ({user_line()}), in which it leaves "
                "tensors: what passes between modules must be tensors, or tuples, lists, dicts "
                "and dataclasses of them (for a cache of Hugging Face: use_cache=False)"
            )


def _holds_tensors(thing: Any, depth: int = 3) -> bool:
    if isinstance(thing, Tensor):
        return True
    if depth == 0 or isinstance(thing, type | nn.Module) or callable(thing):
        return False
    inner = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, list | tuple | set):
        inner += thing
    if isinstance(thing, Mapping):
        inner += thing.values()
    return any(_holds_tensors(part, depth - 1) for part in inner)
