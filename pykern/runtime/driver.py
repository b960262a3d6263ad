"""The words between an executor and the drivers that run its actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .. import _C
from ..plan import Action, Kind

# A plan that is ready to run: on CPU workers, on GPUs.
Program = _C.Program | _C.StreamProgram
Callbacks = Mapping[Kind, Sequence[Callable[[int], None]]]
# The action that raised, or None, its device, or one below 0 for an interrupt, and the exception.
Failure = tuple[Action | None, int, BaseException]
# Gives what an action was in its batch, and which batch that was if it was not the only one.
Located = Callable[[Action], tuple[Action, str]]
