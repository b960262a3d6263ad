"""The collectives within the actions of devices: how a failure ends them in all processes.

A device whose action waits for a peer waits as long as the peer's process keeps its end of the
group, at most for the group's timeout. So after a failure every process gives back the groups of
devices that do nothing, at once, and of others when their action ends: peers that wait are told by
that, fail in turn and do the same, until nobody waits.
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
        group: of the processes.
        device_type: of the pipeline's devices.
        lane_of: by stage, its device.

    Attributes:
        meshes: by device.
        lost: why the processes cannot go on; empty while they can.
    """

    def __init__(self, group: ProcessGroup, device_type: str, lane_of: Sequence[int]) -> None:
        groups = lane_groups(group, max(lane_of) + 1)
        # torch remembers what follows from a mesh for all that are equal, and those of one name
        # are: then one device's tensors would get another's group.
        self.meshes = [
            DeviceMesh.from_group(own, device_type, mesh_dim_names=(f"tp_{own.group_name}",))
            for own in groups
        ]
        self.lost = ""
        self._lane_of = lane_of
        self._timeout: timedelta = timeout_of(group)
        # On GPUs nobody waits on the host, and to give a group back is to wait for it.
        self._gives_back = device_type == "cpu"
        self._lock = threading.Lock()
        self._groups: dict[int, ProcessGroup] = dict(enumerate(groups))
        # The devices that are in an action.
        self._busy: set[int] = set()

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """What to call for an action instead."""
        if kind is Kind.F and stage.next is not None:
            call = partial(_handing_over, stage.next, call)
        return partial(self._guarded, self._lane_of[stage.index], call)

    def _guarded(self, lane: int, call: Run, microbatch: int) -> None:
        with self._lock:
            if self.lost:
                # An exception is on its way to the caller, from another device.
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
        """What to say to who wants to go on."""
        return (
            f"this pipeline has lost the processes with its other shards: {self.lost}; make the "
            "pipeline again, of a plain model, in every process"
        )

    def lose(self, error: BaseException) -> SlicesLost:
        """There is nobody to go on with from now on; returns what to raise if peers did that."""
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
            # Whoever holds the group keeps its connections.
            vars(self.meshes[lane]).get("_pg_registry", {}).clear()
            if group is not None:
                give_back([group])


def _handing_over(following: Stage, call: Run, microbatch: int) -> None:
    call(microbatch)
    if any(is_dtensor(leaf) for leaf in leaves_of(following.arguments[microbatch])):
        raise TypeError(
            f"stage {following.index - 1} hands over a DTensor, which is of its own device's "
            "group: have its last module return what is local (use_local_output=True)"
        )
