"""Whether a saved value can take the place of one that is there: the same keys, kinds and shapes.

A scheduler takes what it is given as its attributes, so a file could otherwise replace any of them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..plan.files.strict_json import shown
from .errors import CheckpointError


def require_form(here: Any, saved: Any, where: str) -> None:
    """Refuses a saved value of another form than the one here.

    None here may become a number, a string or a boolean, but not in a list, where it stands for a
    function without state. A Counter may count other things.

    Raises:
        CheckpointError: The forms differ; the message names the part.
    """
    if here is None and _kind(saved) in ("NoneType", "number", "string", "bool"):
        return
    kind, saved_kind = _kind(here), _kind(saved)
    if kind != saved_kind:
        raise CheckpointError(
            f"{where} must be a {kind}, as it is here, got a {saved_kind} in the file: "
            f"{shown(saved)}"
        )
    if kind == "tensor":
        require_like(here, saved, where)
    elif kind == "list":
        _require_entries(here, saved, where)
    elif kind == "dict":
        require_names(here.keys(), saved.keys(), where)
        for key in here:
            require_form(here[key], saved[key], f"{where}/{key}")


def _require_entries(here: Sequence[Any], saved: Sequence[Any], where: str) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"{where} must have {len(here)} entries, as it has here, got {len(saved)} in the file"
        )
    for index, (ours, theirs) in enumerate(zip(here, saved, strict=True)):
        if ours is None and theirs is not None:
            raise CheckpointError(
                f"{where}/{index} must be None, as it is here, got {shown(theirs)} in the file"
            )
        require_form(ours, theirs, f"{where}/{index}")


def require_names(here: Any, saved: Any, where: str) -> None:
    """Refuses other names than those here, and shows the first that differ."""
    for names, place in ((here - saved, "only here"), (saved - here, "only in the file")):
        if names:
            some = sorted(map(str, names))
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise CheckpointError(
                f"{where} must have the same names in the file, got "
                f"{', '.join(map(shown, some[:3]))}{more} {place}"
            )


def require_like(here: Tensor, saved: Any, where: str) -> None:
    """Refuses anything but a tensor of the same shape and dtype."""
    if not isinstance(saved, Tensor):
        raise CheckpointError(
            f"{where} must be a tensor, as it is here, got {shown(saved)} in the file"
        )
    if (here.shape, here.dtype) != (saved.shape, saved.dtype):
        raise CheckpointError(
            f"{where} must be {described(here)}, as it is here, got {described(saved)} in the file"
        )


def described(tensor: Tensor) -> str:
    """Its dtype and shape, as in "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _kind(value: Any) -> str:
    if isinstance(value, Counter):
        return "Counter"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, list | tuple):
        return "list"
    return {str: "string", dict: "dict", Tensor: "tensor"}.get(type(value), type(value).__name__)
