"""Further replicas of a stage, which run with copies of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...trace import Segment
from ..random.seed import StepSeed
from ..recompute.recompute import Level
from .layer_copies import Pairs, add_gradients, copy_layers, refuse_to_copy, trains
from .stage import Finish, Stage


class Replica(Stage):
    """Another replica of a stage, for other microbatches, on the same device or another."""

    def __init__(self, original: Stage, device: torch.device) -> None:
        super().__init__(original.index, original.layers, device)
        self._original = original
        self._pairs: Pairs = []
        original.reductions.append(lambda: add_gradients(self._pairs))

    def begin(
        self,
        num_microbatches: int,
        seed: StepSeed,
        finish: Finish,
        levels: Sequence[Level | None] = (),
    ) -> None:
        """Begins a step, and copies the layers of the original, which has begun the step."""
        super().begin(num_microbatches, seed, finish, levels)
        self.layers, self._pairs = copy_layers(self._original.layers, self.device)
        for layer in self.layers:
            if isinstance(layer, Segment) and layer.device is not None:
                layer.device = self.device

    def end(self) -> None:
        """Releases all objects of the step."""
        super().end()
        self._pairs = []


def refuse_replicas(layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if layers cannot run in several replicas: see `refuse_to_copy`."""
    refuse_to_copy(layers, None, "a plan with several replicas cannot run it")


def refuse_trained_loss(loss_fn: object) -> None:
    """Raises ValueError if the loss function trains, since all replicas add to its `.grad`."""
    if trains(loss_fn, set()):
        raise ValueError(
            "loss_fn must have no parameters that train for a plan with several replicas, which "
            "would add gradients in no fixed order, got some. Give them to the last layer"
        )
