"""The beginnings of stages, given by the names of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from ..columns import counted
from ..trace import CutError

# Names of the layers that stages begin with; or of layers with a `SplitPoint` of
# torch.distributed.pipelining, or "BEGINNING" or "END", each.
SplitAt: TypeAlias = Sequence[str] | Mapping[str, Any]


def names_of(split_at: SplitAt | None) -> list[str]:
    """The names in `split_at`.

    Raises:
        TypeError: `split_at` is not a `SplitAt`.
    """
    if split_at is None:
        return []
    if isinstance(split_at, str) or not isinstance(split_at, Sequence | Mapping):
        raise TypeError(f"split_at must be a list of names of layers, got {split_at!r}")
    for name in split_at:
        if not isinstance(name, str):
            raise TypeError(f"split_at must hold names of layers, got {name!r}")
    return list(split_at)


def whole_names(whole: Sequence[str]) -> list[str]:
    """The names of modules that stay whole.

    Raises:
        TypeError: `whole` is not a list of names.
    """
    is_list = isinstance(whole, Sequence) and not isinstance(whole, str)
    if not is_list or not all(isinstance(name, str) for name in whole):
        raise TypeError(f"whole must be a list of names of modules, got {whole!r}")
    return list(whole)


def counts_at(layers: Sequence[str], split_at: SplitAt, num_stages: int) -> list[int]:
    """The number of layers of each stage.

    Args:
        layers: the names of all layers, in order.
        split_at: where stages begin. A name may be that of a module around several layers.
        num_stages: the number of stages of the plan.

    Raises:
        CutError: a layer does not exist, or stages would be empty or too many.
    """
    points = split_at if isinstance(split_at, Mapping) else {}
    starts = [
        _position(layers, name, is_end(f"split_at[{name!r}]", points.get(name, "BEGINNING")))
        for name in names_of(split_at)
    ]
    bounds = [0, *starts, len(layers)]
    for (start, end), name in zip(pairwise(bounds), [*names_of(split_at), "the end"], strict=True):
        if start >= end:
            raise CutError(
                "split_at must name layers in their order, from the second on, got "
                f"{list(split_at)}, which leaves no layers in front of {name}. Layers are "
                f"{', '.join(layers)}"
            )
    if len(bounds) - 1 != num_stages:
        raise CutError(
            f"split_at must name {counted(num_stages - 1, 'place')} for the plan's "
            f"{counted(num_stages, 'stage')}, got {len(starts)}"
        )
    return [end - start for start, end in pairwise(bounds)]


def is_end(what: str, point: Any) -> bool:
    """Whether a `SplitPoint`, or its name, is at the end of a module; raises CutError for others.

    Args:
        what: the point's name in a message.
        point: from the user.
    """
    where = getattr(point, "name", point)
    if where not in ("BEGINNING", "END"):
        raise CutError(f"{what} must be BEGINNING or END, got {point!r}")
    return bool(where == "END")


def _position(layers: Sequence[str], name: str, is_end: bool) -> int:
    inside = [
        number
        for number, layer in enumerate(layers)
        if layer == name or layer.startswith((f"{name}.", f"{name} ("))
    ]
    if not inside:
        raise CutError(
            f"split_at must name layers of the model, got {name!r}. Layers are {', '.join(layers)}"
        )
    return inside[-1] + 1 if is_end else inside[0]
