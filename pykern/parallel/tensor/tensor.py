"""Tensor parallel: processes that each run their shard of every stage, by torch's DTensor."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...notes import add_note
from ...plan import Plan
from ...runtime.features.feature import Feature, Made, Told, TrainingStep
from ...runtime.stage.stage import Stage
from ...tensors.dtensor import settle_gradient
from ...tensors.parameters import keep_gradient_dtype
from ...tensors.trees import tensors_in
from ..peers.agreement import agreed_group, digest_of, values_digest
from ..peers.errors import ErrorContext, PeerError, SlicesLost, is_of_peers, shown
from ..peers.exchange import PeerMessage, exchange
from ..peers.groups import Peers, give_back, group_of, meeting
from .even import watch_output
from .meshes import DeviceMeshes
from .shards import Styles, find_shards

# The processes, and the styles by which modules are sharded.
TensorParallelism: TypeAlias = tuple[Peers, Styles]


def parse_tensor(given: TensorParallelism | None) -> ProcessGroup | None:
    """The process group of a user's `tensor_parallel`; None without tensor parallelism.

    Raises:
        TypeError, ValueError: the argument is wrong.
    """
    if given is None:
        return None
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"tensor_parallel must be (mesh['tp'], styles), got {given!r}")
    return group_of(given[0], "tensor_parallel")


class TensorParallel(Feature):
    """The shards of a pipeline's stages that its process runs.

    Each device has a mesh with a process group of its own, since devices call collectives in no
    common order. Within a device, the row of the plan orders the actions, so all processes call the
    device's collectives in the same order.

    Args:
        group: the group of the processes.
        styles: the styles, by module name.
        plan: the plan of the pipeline.
        model: the model, with the user's names.
        stages: the layers of each stage.

    Raises:
        TypeError, ValueError: as `find_shards`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        styles: Styles,
        plan: Plan,
        model: nn.Module,
        stages: Sequence[Sequence[nn.Module]],
    ) -> None:
        self.group = group
        self._plan = plan
        self._found = find_shards(model, stages, styles, group.size())
        self._first = True
        # Whether the peers of a step may have heard from this process, and whether they have.
        self._telling = self._begun = False
        # Process groups made here; closing destroys them.
        self._own: list[ProcessGroup] = []

    def place(self, model: nn.Module, device_type: str, told: Told) -> None:
        """Shards the modules, together with the other processes; the first process's values count.

        Raises:
            PeerError: a process has another model, or has not come.
        """
        values = values_digest((*model.named_parameters(), *model.named_buffers()))
        styles = [f"{one.name} {one.style}" for one in self._found]
        alike = {"the styles": digest_of(styles), "the parameters' values": f"{values:x}"}
        with meeting(self.group):
            self._control = agreed_group(self.group, {**told(), **alike})
            self._own.append(self._control)
        self._slice(device_type)

    def _slice(self, device_type: str) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # noqa: PLC0415 - long

        lane_of = self._plan.placement.replicas[0]
        with meeting(self.group):
            self.lanes = DeviceMeshes(self.group, device_type, lane_of)
        for one in self._found:
            before = dict(one.module.named_parameters())
            try:
                parallelize_module(one.module, self.lanes.meshes[lane_of[one.stage]], one.style)
            except Exception as error:
                add_note(error, f"raised while {one.name} was sharded, in {one.style}")
                raise
            _keep_settings(before, one.module)
            watch_output(one.name, one.module, one.style, self.group.size())

    def attach(self, made: Made) -> None:
        """Wraps the executor's actions, and keeps its stages, which tell if layers draw numbers."""
        made.executor.watch(self.lanes.around)
        # Where batches overlap on CPU workers, stages of a device, and the caller who gathers an
        # output, would call the device's collectives in no fixed order.
        made.executor.overlaps = not made.executor.in_one_memory
        self._stages = made.executor.stages
        for stage in self._stages:
            stage.reductions.append(partial(_settle, stage))

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """The context around a step; it tells errors to peers that wait for the step to begin."""
        del scaler
        self._begun = False
        return ErrorContext(self._leave)

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            return
        if self._telling:
            self._lose(error)
        elif not (self._begun or self.lanes.lost):
            self._tell(error)
        if is_of_peers(error):
            # The error comes from a recorded forward; DeviceMeshes handles the errors of devices.
            raise self._lose(error) from error

    def ready(self) -> None:
        """Raises SlicesLost if the other processes cannot take part any more."""
        if self.lanes.lost:
            raise SlicesLost(self.lanes.message)

    def begin(self, step: TrainingStep) -> None:
        """Begins a step together with the other processes, which have the same batch.

        Raises:
            SlicesLost: a process was lost before, is gone, or has not come in time.
            PeerError: a process has failed, or has another batch or other random numbers.
        """
        self.ready()
        said = self._exchange(PeerMessage(sum(step.rows), self._digest(step.batch)))
        self._begun = True
        for rank, other in enumerate(said):
            who = f"process {rank} of the tensor-parallel group"
            if other.failure:
                raise PeerError(f"{who} has failed before its step: {other.failure}")
            if other.rows != said[0].rows:
                raise PeerError(
                    f"{who} has a batch of {other.rows} rows, and process 0 one of {said[0].rows}. "
                    "Give all of the group the same batches"
                )
            if other.digest != said[0].digest and self._first:
                raise PeerError(
                    f"{who} has another batch than process 0. Give all of the group the same "
                    "batches"
                )
            if other.digest != said[0].digest:
                raise PeerError(
                    f"{who} has other random numbers than process 0, and a layer draws some. Call "
                    "torch.manual_seed with one number in all of the group"
                )
        self._first = False

    def _digest(self, batch: Any) -> int:
        """A digest of the first batch; later of the generator, if layers draw random numbers."""
        if self._first:
            return values_digest(("", tensor) for tensor in tensors_in(batch))
        if not any(stage.draws.possible for stage in self._stages):
            return 0
        return zlib.crc32(torch.default_generator.get_state().numpy().tobytes())

    def _exchange(self, message: PeerMessage) -> list[PeerMessage]:
        # If the exchange is interrupted from here on, the peers may have heard the message or not.
        self._telling = True
        try:
            said = exchange(message, self._control)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._telling = False
        return said

    def _tell(self, error: BaseException) -> None:
        try:
            self._exchange(PeerMessage(failure=shown(error)))
        except BaseException as other:
            self._lose(other)
            add_note(error, f"the peers could not be told: {shown(other)}")

    def _lose(self, error: BaseException) -> SlicesLost:
        """Gives up the peers; peers that wait for this process see it leave."""
        self._telling = False
        self.close()
        return self.lanes.lose(error)

    def close(self) -> None:
        """Gives back the groups of steps; parameters keep their groups, so they can be gathered."""
        give_back(self._own)


def _settle(stage: Stage) -> None:
    for layer in stage.originals:
        for parameter in layer.parameters():
            settle_gradient(parameter)


def _keep_settings(before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Settings that torch's new parameters lack: they forget `grad_dtype`, and some would train."""
    for name, parameter in module.named_parameters():
        if name in before:
            parameter.requires_grad_(before[name].requires_grad)
            keep_gradient_dtype(parameter, before[name])
