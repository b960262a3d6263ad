"""What the actions of a captured step launch, and the copies from graph to graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .... import _C
from ....plan import Action, Kind
from ....tensors.trees import all_tensors, tensors_of
from ..cuda import CapturedGraph
from ..rings import P2PTransfer, RingBuffers, num_bytes_of
from .static_stage import StaticStage

# By kind, stage and slot; None where there is nothing to launch.
Graphs = dict[tuple[Kind, int, int], CapturedGraph | None]


@dataclass(frozen=True)
class Launches:
    """Sets the launches and transfers of a program, between tensors that stay.

    Attributes:
        program: of a training step.
        lanes: that run it.
        lane_of: the lane of each stage.
        rings: of each stage.
        static: the static stage of each stage.
        inputs: by microbatch, the arguments of the first stage.
        targets: by microbatch, where a step's target is; and by slot, where the loss reads it.
        seeds: by stage, the seeds of each microbatch: [microbatches, seeds].
        losses: of all microbatches: [microbatches].
    """

    program: _C.StreamProgram
    lanes: _C.Lanes
    lane_of: Sequence[int]
    rings: Sequence[RingBuffers]
    static: Sequence[StaticStage]
    inputs: Sequence[Any]
    targets: tuple[Sequence[Any], Sequence[Any]]
    seeds: Sequence[Tensor]
    losses: Tensor

    def set(self, action: Action, graphs: Graphs) -> None:
        """Sets what an action launches, what is copied before and after it, and what it sends."""
        stage, number = action.stage, action.microbatch
        slot = self._slot(stage, number)
        graph = graphs[action.kind, stage, slot]
        before: list[P2PTransfer] = []
        after: list[P2PTransfer] = []
        static = self.static[stage]
        if action.kind is Kind.F:
            before = self._fill_inputs(stage, slot, number)
            if stage + 1 < len(self.static):
                self._send(Kind.COPY_F, stage, number, static.outputs[slot])
            else:
                loss = self.static[-1].outputs[slot][0]
                after = [_transfer(self.losses[number], loss)]
        elif action.kind in (Kind.B, Kind.I) and stage > 0:
            after = self._give_gradients(stage, slot, number)
            self._send(Kind.COPY_B, stage, number, static.outgoing[slot])
        handles = (graph.exec, graph.graph) if graph is not None else (0, 0)
        self.program.set_launch(action, *handles, before, after)

    def _fill_inputs(self, stage: int, slot: int, number: int) -> list[P2PTransfer]:
        """What comes to an F from its own lane: the batch's rows, or what the stage before made."""
        transfers = []
        if stage == 0:
            transfers += _transfers(self.static[0].inputs[slot], tensors_of(self.inputs[number]))
        elif self.lane_of[stage - 1] == self.lane_of[stage]:
            made = self.static[stage - 1].outputs[self._slot(stage - 1, number)]
            transfers += _transfers(self.static[stage].inputs[slot], made)
        if stage + 1 == len(self.static):
            rows, places = self.targets
            transfers += _transfers(all_tensors(places[slot]), all_tensors(rows[number]))
        seeds = self.static[stage].seeds[slot]
        return transfers + _transfers([seeds], [self.seeds[stage][number]])

    def _give_gradients(self, stage: int, slot: int, number: int) -> list[P2PTransfer]:
        """What goes from a B or I to the stage before on the same lane.

        At once, because the slot may have a new microbatch before the other B or I begins; that one
        has held its own slot since its F.
        """
        if self.lane_of[stage - 1] != self.lane_of[stage]:
            return []
        places = self.static[stage - 1].incoming[self._slot(stage - 1, number)]
        return _transfers(places, self.static[stage].outgoing[slot])

    def _send(self, kind: Kind, stage: int, number: int, made: Sequence[Tensor | None]) -> None:
        """Sets what the copy of a result moves, where its reader is on another lane."""
        reader = stage + (1 if kind is Kind.COPY_F else -1)
        if self.lane_of[reader] == self.lane_of[stage]:
            return
        static, slot = self.static[reader], self._slot(reader, number)
        places = static.inputs[slot] if kind is Kind.COPY_F else static.incoming[slot]
        transfers = _transfers(places, made)
        if not self.lanes.reaches(self.lane_of[stage], self.lane_of[reader]):
            ring = self.rings[reader]
            transfers = [
                (to, source, size, ring.host((kind, slot, index), size))
                for index, (to, source, size, _) in enumerate(transfers)
            ]
        self.program.set_transfers(Action(kind, stage, number), transfers)

    def _slot(self, stage: int, number: int) -> int:
        return self.static[stage].slot_of(number)


def _transfers(places: Sequence[Tensor | None], made: Sequence[Tensor | None]) -> list[P2PTransfer]:
    return [
        _transfer(place, tensor)
        for place, tensor in zip(places, made, strict=True)
        if place is not None and tensor is not None and tensor.numel() > 0
    ]


def _transfer(place: Tensor, source: Tensor) -> P2PTransfer:
    return place.data_ptr(), source.data_ptr(), num_bytes_of(source), 0
