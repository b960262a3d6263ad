"""The process groups of a pipeline's devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ...attributes import replaced
from .errors import PeerError

# The types that `group_of` takes: a process group, or a mesh of one dimension, which has a group.
Peers = ProcessGroup | DeviceMesh


def group_of(peers: object, argument: str) -> ProcessGroup:
    """The process group that a user's argument stands for.

    Raises:
        TypeError: the argument is neither a process group nor a mesh of one dimension.
        ValueError: this process is not in the group.
    """
    if isinstance(peers, DeviceMesh) and peers.ndim == 1:
        return peers.get_group()
    if peers is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument} must be a group with this process in it, got one without. Give each "
            "process its own group"
        )
    if isinstance(peers, ProcessGroup):
        return peers
    what = type(peers).__name__
    if isinstance(peers, DeviceMesh):
        what = f"mesh of {peers.ndim}: {peers.mesh_dim_names}"
    raise TypeError(
        f"{argument} must be a process group or a mesh of one dimension, as mesh['dp'] is, got a "
        f"{what}"
    )


def lane_groups(group: ProcessGroup, num_lanes: int) -> Sequence[ProcessGroup]:
    """A group of the same processes for each device of a pipeline.

    All processes of a group have to call its collectives in the same order. Devices do not wait for
    each other, so the collectives of two devices have no common order; those of one device have the
    order of its row.

    All processes of the group must call this function, for their pipelines in the same order.
    """
    return [_like(group) for _ in range(num_lanes)]


def control_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same processes for host-only data: tensors on the CPU."""
    return _like(group, backend="gloo")


def _like(group: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    # With a `device_id`, `init_process_group` binds the default group to one GPU, and new groups to
    # the same. NCCL then refuses tensors of other GPUs, and makes new groups with all processes.
    with replaced(dist.group.WORLD, "bound_device_id", None):
        found: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend=backend or _backend_of(group),
            use_local_synchronization=True,
        )
    return cast(ProcessGroup, found)


def _backend_of(group: ProcessGroup) -> str:
    """The backend; as one name if all device types have it, since torch may misread several."""
    given = dist.get_backend_config(group)
    names = {part.rpartition(":")[2] for part in given.split(",")}
    return names.pop() if len(names) == 1 else given


class _Closed:
    """A placeholder that torch counts in place of a group that has been given back.

    Torch names a group by its ranks and by the number of groups in the process. If a name were used
    again, the new group would find the old group's addresses in the store. With the placeholder the
    count only grows; it also stays the same in processes that close a pipeline and in processes
    that keep theirs.
    """

    def shutdown(self) -> None:
        """Does nothing; torch calls it when the process ends."""

    abort = shutdown

    def _get_backend(self, _: object) -> None:
        # Earlier versions of torch call this method; the error tells them of a group without GPUs.
        raise RuntimeError("the group has been given back")


def give_back(groups: Iterable[ProcessGroup]) -> None:
    """Destroys groups that were made here, unless torch.distributed has destroyed them already."""
    for group in groups:
        names: Any = distributed_c10d._world.pg_names
        if group not in names:
            continue
        name = names[group]
        with suppress(Exception):
            dist.destroy_process_group(group)
        if group not in names and dist.is_initialized():
            names[_Closed()] = name


@contextmanager
def meeting(group: ProcessGroup) -> Iterator[None]:
    """The context in which all processes of a group make their pipelines.

    Raises:
        PeerError: a process has not come in time, or is gone.
    """
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(
            "a process of the group has not made its pipeline within "
            f"{timeout_of(group).total_seconds():g} s, or is gone: {error}"
        ) from error


def timeout_of(group: ProcessGroup) -> timedelta:
    """The time that a collective of the group waits for its peers.

    A mesh makes groups that wait for half an hour, even if `init_process_group` got a timeout.
    """
    return min(_timeout(group), _timeout(cast(ProcessGroup, dist.group.WORLD)))


def _timeout(group: ProcessGroup) -> timedelta:
    of_backend: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return of_backend
