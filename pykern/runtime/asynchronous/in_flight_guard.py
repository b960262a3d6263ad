"""Notes the modes and weights that nobody may change while microbatches are in flight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..autograd.cut import version_of
from ..stage.stage import Stage


class InFlightGuard:
    """The modes of the stages' modules and the versions of their parameters after a step.

    Args:
        stages: of one replica.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._modes: list[tuple[nn.Module, bool]] = []
        self._written: list[tuple[nn.Parameter, int]] = []

    def note(self) -> None:
        """Remembers what there is now."""
        modules = [
            m for stage in self._stages for layer in stage.originals for m in layer.modules()
        ]
        self._modes = [(module, module.training) for module in modules]
        self._written = [
            (parameter, version_of(parameter))
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def forget(self) -> None:
        """Nothing is in flight, and everything may be changed."""
        self._modes, self._written = [], []

    def require_modes(self) -> None:
        """Raises RuntimeError where a module is in another mode."""
        if any(module.training != mode for module, mode in self._modes):
            raise RuntimeError(
                "train() or eval() was called with microbatches in flight, which would run in "
                "another mode than their batch: set it back, and call flush() first"
            )

    def is_written(self) -> bool:
        """Whether a parameter was written."""
        return any(version_of(parameter) != version for parameter, version in self._written)
