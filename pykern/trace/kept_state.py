"""All that runs of modules may change beside gradients, to be put back: the one way to do so."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from .. import _C
from ..modes import random_states, set_states
from .contents import HeldContents, holders_of, parameters_in
from .generators import Generators


class KeptState:
    """Attributes, buffers and random numbers, as they are now.

    Args:
        modules: those that run, with all modules in them.
        devices: those whose random numbers count, beside the CPU's.
        settled: modules that keep what a run changes in their attributes, beside tensors.
        tensors: whose values count, beside those of buffers.
        writing: whether forwards may write parameters, whose values then count as well.

    Attributes:
        generators: beside torch's default ones.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        devices: Iterable[torch.device] = (),
        *,
        settled: Collection[nn.Module] = (),
        tensors: Iterable[Tensor] = (),
        writing: bool = True,
    ) -> None:
        modules = list(modules)
        buffers = [held for each in modules for held in each._buffers.values() if held is not None]
        holders = [holder for holder in holders_of(modules) if holder not in settled]
        parameters = parameters_in(modules) if writing else ()
        self._contents = HeldContents(holders, [*buffers, *tensors], parameters)
        self._numbers = random_states(devices)
        self.generators = Generators(modules)

    def kept(self) -> AbstractContextManager[object]:
        """A context, behind which all is as it was."""
        return _C.Undo(self.put_back)

    def put_back(self) -> None:
        """Restores everything; may be called again after an interrupt."""
        set_states(self._numbers)
        self.generators.put_back()
        self._contents.put_back()
