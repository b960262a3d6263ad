"""Parameters that do not train; recompute refuses forwards that write them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...torch_private import is_traceable_wrapper_subclass, storage_of, version_of


class Untrained:
    """The parameters of some modules that do not train, before a forward.

    A forward may write them where they average others, as a teacher's weights do.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # The alias keeps the storage, whose address another one could get.
        self._then = [
            (module, name, held, version_of(held), held.detach())
            for module in modules
            for name, held in module._parameters.items()
            if held is not None and not held.requires_grad
        ]

    def require_unwritten(self) -> None:
        """Raises RuntimeError if a forward has written one, since a recompute would write again."""
        for module, name, held, version, alias in self._then:
            # Wrappers of other tensors have no storage. `held.data = ...` gives another one.
            is_bare = not is_traceable_wrapper_subclass(held)
            is_moved = is_bare and storage_of(held) != storage_of(alias)
            if is_moved or version_of(held) != version:
                raise RuntimeError(
                    "forwards must leave parameters alone under recompute, which runs them twice, "
                    f"got a write to {name!r} of a {type(module).__name__}. Write it between "
                    "steps, make it a buffer, or leave out recompute"
                )
