"""The weight versions of a stage, each as some microbatches in flight have read it, and updates.

Microbatches run on copies of the layers. Each group of an update has one set of copies, with its
own gradients. A copy has the storage that the original has when the group begins. If microbatches
in flight have read the weights, an update first moves the originals to new storage, so that a
backward finds the weights of its forward. The storage of a version is freed with its last
microbatch. Weights that no microbatch in flight has read are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ...torch_private import version_of
from ..stage.layer_copies import Pairs, copy_layers, move_gradients
from ..stage.own_attributes import CopiedAttributes
from ..stage.stage import Run, Stage

# Updates the originals from the gradients in their `.grad`.
Update = Callable[[], None]


@dataclass
class _InFlight:
    """The copies of one group.

    Attributes:
        version: number of updates made before.
        layers: the copies that its microbatches run.
        pairs: parameters of the stage, with the copies.
        buffers: the copied modules that have buffers, each with its buffers at the time of copying.
        attributes: of the copied modules.
    """

    version: int
    layers: Sequence[nn.Module]
    pairs: Pairs
    buffers: Sequence[tuple[nn.Module, dict[str, object]]]
    attributes: CopiedAttributes

    def require_whole(self, stage: int) -> None:
        """Raises RuntimeError if a forward has changed a copy in a way that other copies miss."""
        for _, copy in self.pairs:
            if version_of(copy) != 0:
                raise RuntimeError(
                    f"a layer of stage {stage} wrote into its parameter of shape "
                    f"{tuple(copy.shape)}, but backwards in flight need the former values. Write "
                    "into a copy"
                )
        for module, before in self.buffers:
            if any(module._buffers.get(name) is not value for name, value in before.items()):
                raise RuntimeError(
                    f"a {type(module).__name__} of stage {stage} put another tensor in the place "
                    "of a buffer, which would be lost with the copy that ran. Write into the "
                    "buffer"
                )


class Versions:
    """The older weight versions of a stage; its layers themselves hold the newest weights.

    Args:
        stage: its actions run through these versions.
        group: number of microbatches of one update; slots of a group follow each other.
    """

    def __init__(self, stage: Stage, group: int) -> None:
        self.stage = stage
        self._group = group
        self._newest = 0
        # By group: its copies from its first forward to its last backward, the number of backwards
        # left, and the gradients collected until the update.
        self._in_flight: dict[int, _InFlight] = {}
        self._num_left: dict[int, int] = {}
        self._sums: dict[int, Pairs] = {}
        # The group whose forwards run, since groups follow each other.
        self._running: _InFlight | None = None

    def begin(self) -> None:
        """Begins without microbatches in flight, and without gradients."""
        for layer in self.stage.originals:
            layer.zero_grad()

    def forward(self, call: Run, slot: int) -> None:
        """Runs F, whose work is `call`, on copies of the current weights."""
        if self.stage.arguments[slot] is None:
            return
        number = slot // self._group
        if number not in self._in_flight:
            self.take_back()
            self._running = self._in_flight[number] = self._copy()
        in_flight = self._in_flight[number]
        self.stage.layers = in_flight.layers
        call(slot)
        in_flight.require_whole(self.stage.index)

    def backward(self, call: Run, slot: int) -> None:
        """Runs B or W, the last action of a microbatch."""
        call(slot)
        number = slot // self._group
        num_left = self._num_left.pop(number, self._group) - 1
        if num_left > 0:
            self._num_left[number] = num_left
        elif number in self._in_flight:
            done = self._in_flight.pop(number)
            self._sums[number] = done.pairs
            if done is self._running:
                self.take_back()
                self._running = None

    def update(self, step: Update, slot: int) -> None:
        """Runs U: `step` updates the weights from the gradients that a group has collected.

        A group without rows does not change the weights.

        Raises:
            RuntimeError: parameters have gradients from outside the group.
        """
        pairs = self._sums.pop(slot // self._group, None)
        if pairs is None:
            return
        self._refuse_others(pairs)
        originals = [original for original, copy in pairs if copy.grad is not None]
        if any(group.version == self._newest for group in self._in_flight.values()):
            for original in originals:
                original.data = original.data.clone()
        try:
            move_gradients(pairs)
            step()
            self._newest += 1
        finally:
            for original in originals:
                original.grad = None

    def _refuse_others(self, pairs: Pairs) -> None:
        """Raises RuntimeError for a gradient that does not come from a microbatch of the stage."""
        for original, _ in pairs:
            if original.grad is not None:
                raise RuntimeError(
                    f"a parameter of stage {self.stage.index}, of shape {tuple(original.shape)}, "
                    "got a gradient from outside its stage, which updates would ignore: from a "
                    "loss_fn that uses parameters, or a backward of yours with microbatches in "
                    "flight. Have a layer add it, or a hook of the parameter"
                )

    def take_back(self) -> None:
        """Gives the layers the attributes that forwards of copies have assigned."""
        if self._running is not None:
            self._running.attributes.take_back()

    def end(self) -> None:
        """Lets go of everything in flight."""
        self._running = None
        self._in_flight.clear()
        self._num_left.clear()
        self._sums.clear()

    def _copy(self) -> _InFlight:
        layers, pairs = copy_layers(self.stage.originals, None, counted_apart=True)
        modules = [module for layer in layers for module in layer.modules() if module._buffers]
        buffers = [(module, dict[str, object](module._buffers)) for module in modules]
        attributes = CopiedAttributes(self.stage.originals, layers)
        return _InFlight(self._newest, layers, pairs, buffers, attributes)
