"""A trial run of stages that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .buffers import modules_in
from .graph import leaves_of
from .random import NoteOwn
from .stage import Ends, Finish, Stage


class Trial:
    """Notes in a first run what else would change than the stages' own gradients.

    Args:
        finish: as of a step.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        # What the loss is computed from has gradients of its own, put aside meanwhile.
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._generators = NoteOwn()

    def first(self, microbatch: int, output: Any, once: bool) -> Ends:
        """The `finish` of the first run."""
        ends = self._finish(microbatch, output, once)
        for leaf in leaves_of(ends[0]):
            self._gradients.append((leaf, leaf.grad))
            leaf.grad = None
        return ends

    def noting(self) -> NoteOwn:
        """The mode of the first run."""
        return self._generators

    @contextmanager
    def without_trace(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Puts back, in the end, what has been noted, buffers, and torch's random numbers."""
        devices = {stage.device.index for stage in stages if stage.device.type == "cuda"}
        layers = [layer for stage in stages for layer in stage.layers]
        modules = modules_in([*layers, getattr(self._finish, "function", None)])
        buffers = [buffer for module in modules for buffer in module._buffers.values()]
        saved = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            try:
                yield
            finally:
                for generator, state in self._generators.begins.items():
                    generator.set_state(state)
                for leaf, gradient in self._gradients:
                    leaf.grad = gradient
                with torch.no_grad():
                    for buffer, value in saved:
                        buffer.copy_(value)
