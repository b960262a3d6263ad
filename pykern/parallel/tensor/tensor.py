"""Tensor parallel: processes that each run their slice of every stage, by torch's DTensor."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...notes import add_note
from ...partition.balance import Partition
from ...plan import Plan
from ...runtime.executor import Executor
from ...runtime.gpu.capture.policy import Capture
from ...runtime.stage.stage import Stage
from ...tensors.dtensor import settle_gradient
from ...tensors.trees import leaves_of
from ..peers.agreement import agreed_group, digest_of, values_digest
from ..peers.errors import Around, PeerError, SlicesLost, is_of_peers, shown
from ..peers.exchange import Message, exchange
from ..peers.groups import Peers, give_back, group_of, meeting
from ..refused import refuse_budget
from .meshes import Lanes
from .slices import Slice, Styles, find_slices, refuse_distributed

# The processes, and what is sliced in which way.
TensorParallelism: TypeAlias = tuple[Peers, Styles]


class Whole:
    """Of a pipeline that has all of its stages in its process.

    Attributes:
        group: of the processes with slices of these; None for no others.
    """

    group: ProcessGroup | None = None

    def find(self, model: nn.Module, layers: Sequence[nn.Module], cut: Partition) -> None:
        """Finds the modules that are to be sliced: none, so none may be distributed."""
        del layers, cut
        refuse_distributed(model)

    def slice(self, model: nn.Module, device_type: str, told: Mapping[str, str]) -> None:
        """Slices them."""

    def watch(self, executor: Executor, stages: Sequence[Stage]) -> None:
        """Is told of what runs."""

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """Around all of a step."""
        del scaler
        return nullcontext()

    def require_peers(self) -> None:
        """Raises SlicesLost where other processes cannot take part."""

    def begin(self, rows: int, batch: Any) -> None:
        """Begins a step together with other processes."""

    def close(self) -> None:
        """Gives back what steps need."""


class TensorParallel(Whole):
    """The slices of a pipeline's stages that its process runs.

    Each device has a mesh with a process group of its own, since devices call collectives in no
    common order. Of a device's stages each action, which is the same in all processes, has its
    place in the row of the plan.

    Args:
        given: the user's argument.
        plan: of the pipeline.

    Raises:
        TypeError, ValueError: the argument is wrong, or cannot be had with something else.
    """

    def __init__(self, given: TensorParallelism, plan: Plan) -> None:
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(f"tensor_parallel is (mesh['tp'], styles), got {given!r}")
        if plan.placement.num_replicas > 1:
            raise ValueError(
                f"the plan has {plan.placement.num_replicas} replicas, whose copies would be sliced"
                " over the groups of other devices: tensor_parallel takes plans with one"
            )
        peers, self._styles = given
        self.group: ProcessGroup = group_of(peers, "tensor_parallel")
        self._plan = plan
        self._found: Sequence[Slice] = ()
        self._first = True
        # Whether the peers of a step may have heard from this process, and whether they have.
        self._telling = self._begun = False
        self._stages: Sequence[Stage] = ()

    def find(self, model: nn.Module, layers: Sequence[nn.Module], cut: Partition) -> None:
        """Finds the modules that are to be sliced, which `slice` does.

        Raises:
            TypeError, ValueError: as `find_slices`.
        """
        refuse_distributed(model)
        stages = [layers[span.start : span.stop] for span in cut.stages]
        self._found = find_slices(model, stages, self._styles)

    def slice(self, model: nn.Module, device_type: str, told: Mapping[str, str]) -> None:
        """Slices them, together with the other processes; the first one's values are taken.

        Args:
            model: with the user's names, where its devices are.
            device_type: of these.
            told: by what it is, what all processes have to have alike.

        Raises:
            PeerError: they have not, or one has not come.
        """
        values = values_digest((*model.named_parameters(), *model.named_buffers()))
        styles = [f"{one.name} {one.style}" for one in self._found]
        told = {**told, "the styles": digest_of(styles), "the parameters' values": f"{values:x}"}
        with meeting(self.group):
            self._control = agreed_group(self.group, told)
        try:
            self._slice(device_type)
        except BaseException:
            self.close()
            raise

    def _slice(self, device_type: str) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # noqa: PLC0415 - long

        placement = self._plan.placement
        lane_of = [placement.device_of(stage) for stage in range(self._plan.num_stages)]
        with meeting(self.group):
            self.lanes = Lanes(self.group, device_type, lane_of)
        for one in self._found:
            try:
                parallelize_module(one.module, self.lanes.meshes[lane_of[one.stage]], one.style)
            except Exception as error:
                add_note(error, f"raised while {one.name} was sliced, in {one.style}")
                raise

    def watch(self, executor: Executor, stages: Sequence[Stage]) -> None:
        """Is told of what runs; the stages say whether they draw random numbers."""
        executor.watch(self.lanes.around)
        self._stages = stages
        for stage in stages:
            stage.reductions.append(partial(_settle, stage))

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """Around all of a step; peers that wait for it to begin are told what is raised in it.

        Raises:
            ValueError: there is a scaler.
        """
        if scaler is not None:
            raise ValueError(
                "scaler with tensor_parallel: torch's GradScaler takes no gradients of which some "
                "are DTensors, or are over several groups; train in bfloat16, or in float32"
            )
        self._begun = False
        return Around(self._leave)

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            return
        if self._telling:
            self._lose(error)
        elif not (self._begun or self.lanes.lost):
            self._tell(error)
        if is_of_peers(error):
            # Of a forward that was recorded: those of devices are looked at there.
            raise self._lose(error) from error

    def require_peers(self) -> None:
        """Raises SlicesLost where other processes cannot take part."""
        if self.lanes.lost:
            raise SlicesLost(self.lanes.message)

    def begin(self, rows: int, batch: Any) -> None:
        """Begins a step together with the other processes, which have the same batch.

        Raises:
            SlicesLost: one was lost before, is gone, or has not come in time.
            PeerError: one has failed, or does something else.
        """
        self.require_peers()
        said = self._exchange(Message(rows, self._digest(batch)))
        self._begun = True
        for rank, other in enumerate(said):
            who = f"process {rank} of the tensor-parallel group"
            if other.failure:
                raise PeerError(f"{who} has failed before its step: {other.failure}")
            if other.rows != said[0].rows:
                raise PeerError(
                    f"{who} has a batch of {other.rows} rows, and process 0 one of {said[0].rows}: "
                    "all of the group take the same batches"
                )
            if other.digest != said[0].digest and self._first:
                raise PeerError(f"{who} has another batch than process 0: all take the same ones")
            if other.digest != said[0].digest:
                raise PeerError(
                    f"{who} has other random numbers than process 0, and a layer draws some: call "
                    "torch.manual_seed with one number in all of the group"
                )
        self._first = False

    def _digest(self, batch: Any) -> int:
        """Of the first batch; later, where layers draw, of the generator."""
        if self._first:
            tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
            return values_digest(("", tensor) for tensor in tensors)
        if not any(stage.draws.possible for stage in self._stages):
            return 0
        return zlib.crc32(torch.default_generator.get_state().numpy().tobytes())

    def _exchange(self, message: Message) -> list[Message]:
        # What is interrupted from here on, peers may have heard or not.
        self._telling = True
        try:
            said = exchange(message, self._control)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._telling = False
        return said

    def _tell(self, error: BaseException) -> None:
        try:
            self._exchange(Message(failure=shown(error)))
        except BaseException as other:
            self._lose(other)
            add_note(error, f"the peers could not be told: {shown(other)}")

    def _lose(self, error: BaseException) -> SlicesLost:
        """There is nobody to go on with; who waits for this process sees it leave."""
        self._telling = False
        self.close()
        return self.lanes.lose(error)

    def close(self) -> None:
        """Gives back what steps need; the parameters keep their groups, to be gathered."""
        give_back([self._control])


def _settle(stage: Stage) -> None:
    for layer in stage.originals:
        for parameter in layer.parameters():
            settle_gradient(parameter)


def open_tensor(
    given: TensorParallelism | None, plan: Plan, capture: Capture, recompute: object
) -> Whole:
    """What a user's argument stands for.

    Raises:
        TypeError, ValueError: it is wrong, or cannot stand beside the others.
    """
    if given is None:
        return Whole()
    if capture is not False:
        raise ValueError(
            f"capture={capture!r} with tensor_parallel: torch computes with DTensors in Python, "
            "which a captured step replays without; use capture=False"
        )
    refuse_budget(recompute)
    return TensorParallel(given, plan)
