"""Parameters and modules that several stages use: one stage has the originals, others copies.

The owner is the first stage that uses them; its microbatches add to the originals' `.grad` as ever.
Each other stage runs with copies, which collect their own gradients. When a step has ended, the
gradient sum of each of these stages is added to the originals', in ascending order of stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...notes import add_note
from ...torch_private import version_of
from ..recompute.buffers import modules_in
from .layer_copies import Pairs, add_gradients, copy_layers
from .own_attributes import CopiedAttributes
from .stage import Stage


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module that runs in a stage, as a step finds it.

    A module that several stages share must not write its buffers. A copied module of one stage may
    write into a buffer, but a tensor that replaces the buffer would be lost with the copy.
    """

    stage: int
    module: nn.Module
    name: str
    value: Tensor
    version: int
    is_shared: bool

    def is_spoilt(self) -> bool:
        if self.module._buffers.get(self.name) is not self.value:
            return True
        return self.is_shared and version_of(self.value) != self.version


class Ties:
    """The parameters and modules that stages share, found anew in each step.

    Args:
        stages: of the first replica.

    Attributes:
        adds: whether gradients of copies are being added to those of the originals.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # The parameters with their copies, by stage in ascending order.
        self._pairs: list[Pairs] = []
        self._buffers: list[_Buffer] = []
        # The attributes of copies, each with the index of the stage.
        self._attributes: list[tuple[int, CopiedAttributes]] = []
        self.adds = False

    def begin(self) -> None:
        """Replaces shared layers by copies in all stages but the owner; steps must have begun.

        A tensor that is on the stage's device and does not train is not copied.
        """
        self.end()
        owned: set[int] = set()
        for stage in self._stages:
            assert stage.settings is not None
            used = stage.settings.ids()
            if not used.isdisjoint(owned):
                self._share(stage, {item for item in stage.settings.held() if id(item) in owned})
            owned |= used

    def _share(self, stage: Stage, shared: Collection[nn.Module | nn.Parameter]) -> None:
        foreign = {tensor for item in shared for tensor in _foreign(item, stage.device)}
        if foreign:
            stage.layers, pairs = copy_layers(stage.originals, stage.device, foreign)
            self._attributes.append((stage.index, CopiedAttributes(stage.originals, stage.layers)))
            if torch.is_grad_enabled():
                self._pairs.append(pairs)
        self._buffers += _buffers_of(stage, shared)

    def finish(self) -> None:
        """Takes attributes of copies back, and adds gradients of copies, with parameters' hooks.

        By now, torch's current streams wait for the step.

        Raises:
            RuntimeError: the step has written a buffer or attribute that stages share.
            BaseException: a hook of a parameter raised it; it has a note.
        """
        for buffer in self._buffers:
            if buffer.is_spoilt():
                name = f"buffer {buffer.name!r} of a {type(buffer.module).__name__}"
                raise _lost(buffer.stage, name)
        for index, attributes in self._attributes:
            lost = attributes.take_back()
            if lost is not None:
                raise _lost(index, lost)
        if not self._pairs:
            return
        self.adds = True
        try:
            # Backward runs on the calling thread, as in the step.
            with torch.autograd.set_multithreading_enabled(False):
                for pairs in self._pairs:
                    _record(pairs)
                    add_gradients(pairs)
        except BaseException as error:
            add_note(error, "raised while the gradients of several stages were added")
            raise
        finally:
            self.adds = False

    def leave(self) -> list[Pairs]:
        """Returns the copies, for a backward in another step."""
        return self._pairs

    def resume(self, pairs: list[Pairs]) -> None:
        """Takes the copies back, in the step that has the backward."""
        self._pairs = pairs

    def end(self) -> None:
        """Releases all objects of the step; a step that has failed leaves its attributes."""
        for _, attributes in self._attributes:
            attributes.take_back()
        self._pairs, self._buffers, self._attributes = [], [], []


def _foreign(item: nn.Module | nn.Parameter, device: torch.device) -> Iterator[Tensor]:
    """The tensors of a shared item that a later stage on the device must copy."""
    if isinstance(item, nn.Module):
        yield from (buffer for buffer in item.buffers(recurse=False) if buffer.device != device)
    elif item.device != device or (item.requires_grad and torch.is_grad_enabled()):
        yield item


def _buffers_of(stage: Stage, shared: Collection[nn.Module | nn.Parameter]) -> Iterator[_Buffer]:
    """The buffers of shared modules and of copies."""
    for original, module in zip(modules_in(stage.originals), modules_in(stage.layers), strict=True):
        is_shared = original in shared
        if is_shared or module is not original:
            for name, value in module._buffers.items():
                if value is not None:
                    version = version_of(value)
                    yield _Buffer(stage.index, module, name, value, version, is_shared)


def _lost(stage: int, name: str) -> RuntimeError:
    return RuntimeError(
        f"stage {stage} wrote the {name}, which is shared with an earlier stage: the value written "
        "is lost or in no fixed order. Cut so that they share a stage (balance=[...]), or untie "
        "them"
    )


def _record(pairs: Pairs) -> None:
    """Keeps the lanes' memory of gradients allocated until the current streams have read it."""
    for _, copy in pairs:
        gradient = copy.grad
        if gradient is not None and gradient.is_cuda:
            parts = (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)
            for part in parts:
                part.record_stream(torch.cuda.current_stream(part.device))
