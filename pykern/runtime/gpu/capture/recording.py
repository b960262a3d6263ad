"""Graph mode: the actions of a training step as CUDA graphs, one for each stage, kind and slot.

The first step of a kind runs as usual, which warms up torch and its libraries. Before the second
step, every action is captured on the stream of its lane, with static addresses. Every slot has its
own memory, so that other graphs do not overwrite the tensors that a slot's F keeps for its B. From
then on a step is a list of launches and copies, which C++ issues without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .... import _C
from ....kernels.head_loss import new_gradient
from ....plan import Action, Kind, Plan
from ....tensors.trees import all_tensors, map_tensors, tensors_of
from ... import microbatch
from ...batch import Batch
from ...loss import Losses
from ...random.seed import StepSeed
from ...stage.stage import Stage
from ..cuda import CapturedGraph, Gpus
from ..rings import P2PTransfer, RingBuffers, transfer_to, transfers_between
from .pools import Pools
from .quiet import no_collection, nothing_cached
from .refusals import CannotCapture, named
from .static_stage import CellKey, StaticStage, distinct


class Recording:
    """The graphs of a training program, and the tensors that they read and write.

    Args:
        gpus: of the lanes.
        program: of the plan; its launches and transfers are set here.
        stages: of one replica.
        lane_of: the lane of each stage.
        batch: an example of the batches to capture.
        trained: the parameters that get gradients in a step.
    """

    def __init__(
        self,
        gpus: Gpus,
        program: _C.StreamProgram,
        stages: Sequence[Stage],
        lane_of: Sequence[int],
        batch: Batch,
        trained: Sequence[Tensor],
    ) -> None:
        self._gpus = gpus
        self._program = program
        self._stages = stages
        self._lane_of = lane_of
        self._rings = [RingBuffers(gpus, lane) for lane in lane_of]
        self._graphs: dict[tuple[Kind, int, int], CapturedGraph | None] = {}
        # Earlier stages have forwards only.
        self._first_trained = program.plan.first_trained
        self._gradients = [(parameter, _gradient_of(parameter)) for parameter in trained]
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

        # A copy of the batch, from which slots are filled.
        first, last = gpus.device(lane_of[0]), gpus.device(lane_of[-1])
        self._inputs = _copy_to(batch.inputs, first)
        self._target = _copy_to(batch.target, last)
        parts = microbatch.split(self._inputs, batch.rows)
        # The arguments of the first stage, by microbatch.
        self._input_parts = [call[0] for call in batch.enter(parts) if call is not None]
        self._target_parts = microbatch.split(self._target, batch.rows)
        cells = [_cells(program, batch, stage.index) for stage in stages]
        self._targets = [_copy_to(self._target_parts[0], last) for _ in distinct(cells[-1])]
        assert isinstance(batch.finish, Losses)
        self._scale = _copy_to(batch.finish.scale, last)
        self._losses = batch.finish.among(
            None if batch.target is None else self._targets, len(self._targets), self._scale
        )
        self._static = [
            StaticStage(stage, ring, of_stage, self._losses)
            for stage, ring, of_stage in zip(stages, self._rings, cells, strict=True)
        ]
        # The seeds to copy into slots, by stage and microbatch.
        self._seeds = [
            ring.place(("seeds",), static.seeds[0].new_empty(len(batch.rows), len(static.seeds[0])))
            for ring, static in zip(self._rings, self._static, strict=True)
        ]
        self._pools = [Pools(gpus, program.plan, stage.index) for stage in stages]
        self._capture(program.plan)
        losses = self._static[-1].outputs[0][0].new_empty(len(batch.rows))
        self._loss_of = self._rings[-1].place(("losses",), losses)
        for row in program.plan.rows:
            for action in row:
                self._set_launch(action)

    def load(self, batch: Batch) -> None:
        """Copies a batch, and gradients of parameters, into place on the current streams."""
        assert isinstance(batch.finish, Losses)
        kept = (self._inputs, self._target, self._scale)
        given = (batch.inputs, batch.target, batch.finish.scale)
        for static, value in zip(all_tensors(kept), all_tensors(given), strict=True):
            static.copy_(value, non_blocking=True)
        self._load_seeds()
        zeroed: dict[torch.device, list[Tensor]] = {}
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                zeroed.setdefault(gradient.device, []).append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        # torch fills tensors of one GPU by one kernel, but those of several one by one.
        for on_one in zeroed.values():
            torch._foreach_zero_(on_one)

    def _load_seeds(self) -> None:
        """Draws the seeds that the forwards would draw from the caller's generator."""
        step = StepSeed()
        for stage, seeds in zip(self._stages, self._seeds, strict=True):
            rows, count = seeds.shape
            if count > 0:
                # The number of seeds is as in the capture, whatever other steps have drawn since.
                drawn = [stage.draws.seeds_of(step, number, count) for number in range(rows)]
                seeds.copy_(torch.stack(drawn), non_blocking=True)
        step.use()

    def collect(self, losses: Losses) -> None:
        """Gives the losses of the issued step to `losses`."""
        losses.take(list(self._loss_of.unbind()))

    def _capture(self, plan: Plan) -> None:
        """Captures all forwards, then all backwards: results are examples for the next stage.

        Within a slot of a stage, the order is the same as in every step.
        """
        # Once, because each time costs a wait and the memory is allocated anew.
        self._gpus.give_back_cache()
        with torch.enable_grad(), nothing_cached(), no_collection():
            arguments = self._input_parts[0]
            leaves: Sequence[Tensor] = ()
            for stage, static in enumerate(self._static):
                for slot in self._pools[stage].slots(self._lane_of[stage], static.num_slots):
                    static.take(slot, arguments, leaves)
                    pool = self._pools[stage].of(static.ring_slot(slot))
                    self._record(Kind.F, stage, slot, pool)
                if stage + 1 < len(self._static):
                    arguments, leaves = static.handed(0)
            gradients: Sequence[Tensor | None] = ()
            for stage, static in reversed(list(enumerate(self._static))[self._first_trained :]):
                for slot in range(static.num_slots):
                    if stage + 1 < len(self._static):
                        static.expect(slot, gradients)
                    self._capture_backward(plan, stage, slot)
                gradients = static.outgoing[0]

    def _capture_backward(self, plan: Plan, stage: int, slot: int) -> None:
        static, pools = self._static[stage], self._pools[stage]
        pool = pools.of(static.ring_slot(slot))
        if static.is_recomputed(slot):
            pool = pools.of_recompute(static.ring_slot(slot))
            self._record(Kind.R, stage, slot, pool)
        self._refuse_others(stage, slot)
        for kind in _backward_kinds(plan, stage):
            self._record(kind, stage, slot, pool)

    def _refuse_others(self, stage: int, slot: int) -> None:
        """Raises CannotCapture for newly trained tensors, whose gradients a graph would own."""
        known = {id(parameter) for parameter, _ in self._gradients}
        if any(id(leaf) not in known for leaf in self._static[stage].trains(slot)):
            raise CannotCapture(
                f"stage {stage}, or the loss, trains a tensor that is not a parameter of its "
                "layers, or that had no gradient after the step before"
            )

    def _record(self, kind: Kind, stage: int, slot: int, pool: Any) -> None:
        static = self._static[stage]
        graph = None
        if static.has(kind, slot):
            try:
                graph = self._gpus.capture(
                    self._lane_of[stage], pool, lambda: static.run(kind, slot)
                )
            except Exception as error:
                where = named(error, self._stages[stage])
                raise CannotCapture(
                    f"{kind.name} of {where} cannot be captured: {error}"
                ) from error
        self._graphs[kind, stage, slot] = graph

    def _set_launch(self, action: Action) -> None:
        program, stage, number = self._program, action.stage, action.microbatch
        slot = self._slot(stage, number)
        graph = self._graphs[action.kind, stage, slot]
        before: list[P2PTransfer] = []
        after: list[P2PTransfer] = []
        static = self._static[stage]
        if action.kind is Kind.F:
            before = self._fill_inputs(stage, slot, number)
            if stage + 1 < len(self._static):
                self._send(Kind.COPY_F, stage, number, static.outputs[slot])
            else:
                loss = self._static[-1].outputs[slot][0]
                after = [transfer_to(self._loss_of[number], loss)]
        elif action.kind in (Kind.B, Kind.I) and stage > self._first_trained:
            if self._lane_of[stage - 1] == self._lane_of[stage]:
                after = self._give_gradients(stage, slot, number)
            else:
                made, after = static.to_send(slot, shared=self._pools[stage].are_shared)
                self._send(Kind.COPY_B, stage, number, made)
        handles = (graph.exec, graph.graph) if graph is not None else (0, 0)
        program.set_launch(action, *handles, before, after)

    def _fill_inputs(self, stage: int, slot: int, number: int) -> list[P2PTransfer]:
        """Transfers to an F on its own lane: rows of the batch, or outputs of the stage before."""
        transfers = []
        if stage == 0:
            transfers += transfers_between(
                self._static[0].inputs[slot], tensors_of(self._input_parts[number])
            )
        elif self._lane_of[stage - 1] == self._lane_of[stage]:
            made = self._static[stage - 1].outputs[self._slot(stage - 1, number)]
            transfers += transfers_between(self._static[stage].inputs[slot], made)
        if stage + 1 == len(self._static):
            targets = all_tensors(self._target_parts[number])
            transfers += transfers_between(all_tensors(self._targets[slot]), targets)
        seeds = self._static[stage].seeds[slot]
        return transfers + transfers_between([seeds], [self._seeds[stage][number]])

    def _give_gradients(self, stage: int, slot: int, number: int) -> list[P2PTransfer]:
        """Transfers of gradients to the stage before on the same lane.

        The transfers run at once, because this slot may get a new microbatch before the other
        stage's B or I begins. The other stage has held its own slot since its F.
        """
        places = self._static[stage - 1].incoming[self._slot(stage - 1, number)]
        return transfers_between(places, self._static[stage].outgoing[slot])

    def _send(self, kind: Kind, stage: int, number: int, made: Sequence[Tensor | None]) -> None:
        """Sets the transfers of a result to a reader on another lane."""
        reader = stage + (1 if kind is Kind.COPY_F else -1)
        if self._lane_of[reader] == self._lane_of[stage]:
            return
        static, slot = self._static[reader], self._slot(reader, number)
        places = static.inputs[slot] if kind is Kind.COPY_F else static.incoming[slot]
        transfers = transfers_between(places, made)
        if not self._gpus.lanes.reaches(self._lane_of[stage], self._lane_of[reader]):
            ring = self._rings[reader]
            transfers = [
                (to, source, size, ring.host((kind, slot, index), size))
                for index, (to, source, size, _) in enumerate(transfers)
            ]
        self._program.set_transfers(Action(kind, stage, number), transfers)

    def _slot(self, stage: int, number: int) -> int:
        return self._static[stage].slot_of(number)


def _cells(program: _C.StreamProgram, batch: Batch, stage: int) -> list[CellKey]:
    """The slot and the level of each microbatch at a stage."""
    count = len(batch.rows)
    levels = batch.levels[stage] if batch.levels else [None] * count
    return list(zip(program.slots(stage)[:count], levels, strict=True))


def _backward_kinds(plan: Plan, stage: int) -> Sequence[Kind]:
    """The kinds of a backward of the stage, which are the same for all microbatches."""
    found = {
        action.kind
        for row in plan.rows
        for action in row
        if action.stage == stage and action.kind not in (Kind.F, Kind.R)
    }
    if found == {Kind.B}:
        return [Kind.B]
    if found == {Kind.I, Kind.W}:
        return [Kind.I, Kind.W]
    names = ", ".join(sorted(kind.name for kind in found))
    raise CannotCapture(f"stage {stage} has {names}; captured are B alone, or I and W")


def _gradient_of(parameter: Tensor) -> Tensor:
    """A tensor to collect the parameter's gradients in, with the current gradient, if any."""
    collected = new_gradient(parameter)
    return collected if parameter.grad is None else collected.copy_(parameter.grad)


def _copy_to(tree: Any, device: torch.device) -> Any:
    """A copy of the tree's tensors on a device, in which each row is contiguous in memory."""

    def copy(tensor: Tensor) -> Tensor:
        # The copy keeps the tensor's memory order of dimensions, if rows come first in it.
        copied = torch.empty_like(tensor, device=device, requires_grad=False)
        if copied.dim() > 0 and copied.stride(0) * copied.size(0) != copied.numel():
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return copied.copy_(tensor.detach())

    return map_tensors(copy, tree)
