"""Device meshes for tensor parallelism: how a failure ends the collectives in all processes.

A device whose action waits for a peer waits as long as the peer's process keeps its end of the
group, at most for the group's timeout. So after a failure every process gives back the groups of
idle devices at once, and the groups of other devices when their action ends. Waiting peers notice
this, fail in turn and do the same, until no process waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...plan import Kind
from ...runtime.stage.stage import Run, Stage
from ...tensors.dtensor import is_dtensor
from ...tensors.trees import leaves_of
from ..peers.errors import SlicesLost, is_of_peers, shown
from ..peers.groups import give_back, lane_groups, timeout_of


class DeviceMeshes:
    """A mesh for each device of a pipeline.

    Args:
        group: the group of the processes.
        device_type: the type of the pipeline's devices.
        lane_of: by stage, its device.

    Attributes:
        meshes: by device, its mesh.
        lost: the reason why the processes cannot go on; empty while they can.
    """

    def __init__(self, group: ProcessGroup, device_type: str, lane_of: Sequence[int]) -> None:
        groups = lane_groups(group, max(lane_of) + 1)
        # torch caches results by mesh, and meshes of one name are equal: with one name for all,
        # the tensors of a device would get the group of another device.
        self.meshes = [
            DeviceMesh.from_group(own, device_type, mesh_dim_names=(f"tp_{own.group_name}",))
            for own in groups
        ]
        self.lost = ""
        self._lane_of = lane_of
        self._timeout: timedelta = timeout_of(group)
        # On GPUs no host thread waits for a peer, and giving a group back would wait for the GPU.
        self._gives_back = device_type == "cpu"
        self._lock = threading.Lock()
        self._groups: dict[int, ProcessGroup] = dict(enumerate(groups))
        # The devices that are in an action.
        self._busy: set[int] = set()

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The function to call instead of `call`, the function of an action."""
        if kind is Kind.F and stage.next is not None:
            call = partial(_handing_over, stage.next, call)
        return partial(self._guarded, self._lane_of[stage.index], call)

    def _guarded(self, lane: int, call: Run, microbatch: int) -> None:
        with self._lock:
            if self.lost:
                # Another device has raised, and its exception is on the way to the caller.
                return
            self._busy.add(lane)
        try:
            call(microbatch)
        except BaseException as error:
            lost = self.lose(error)
            if is_of_peers(error):
                raise lost from error
            raise
        finally:
            with self._lock:
                self._busy.discard(lane)
                if self.lost:
                    self._give_back([lane])

    @property
    def message(self) -> str:
        """The error message for further calls after the loss."""
        return (
            f"this pipeline has lost the processes with its other shards: {self.lost}; make the "
            "pipeline again, of a plain model, in every process"
        )

    def lose(self, error: BaseException) -> SlicesLost:
        """Gives up the peers for good; returns the error to raise if peers are the cause."""
        with self._lock:
            self.lost = self.lost or shown(error)
            self._give_back(self._groups.keys() - self._busy)
        seconds = self._timeout.total_seconds()
        return SlicesLost(
            "a process with other shards of these stages has failed, is gone, or has not come "
            f"within {seconds:g} s: {shown(error)}"
        )

    def _give_back(self, lanes: Any) -> None:
        for lane in lanes if self._gives_back else ():
            group = self._groups.pop(lane, None)
            # A group's connections last as long as any reference to it, so the mesh must drop it.
            vars(self.meshes[lane]).get("_pg_registry", {}).clear()
            if group is not None:
                give_back([group])


def _handing_over(following: Stage, call: Run, microbatch: int) -> None:
    call(microbatch)
    if any(is_dtensor(leaf) for leaf in leaves_of(following.arguments[microbatch])):
        raise TypeError(
            f"stage {following.index - 1} must hand over plain tensors, got a DTensor, which is of "
            "its own device's group. Have its last module return what is local "
            "(use_local_output=True)"
        )
