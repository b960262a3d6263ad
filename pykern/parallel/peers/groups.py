"""The process groups of a pipeline's devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .errors import PeerError

# What `group_of` takes: a group of processes, or a mesh of one dimension, which is one.
Peers = ProcessGroup | DeviceMesh


def group_of(peers: object, argument: str) -> ProcessGroup:
    """The process group that a user's argument stands for.

    Raises:
        TypeError: it is no group, and no mesh of one dimension.
        ValueError: this process is not in it.
    """
    if isinstance(peers, DeviceMesh) and peers.ndim == 1:
        return peers.get_group()
    if peers is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{argument} is a group that this process is not in")
    if isinstance(peers, ProcessGroup):
        return peers
    what = type(peers).__name__
    if isinstance(peers, DeviceMesh):
        what = f"mesh of {peers.ndim}: {peers.mesh_dim_names}"
    raise TypeError(
        f"{argument} is a process group or a mesh of one dimension, as mesh['dp'] is; got a {what}"
    )


def lane_groups(group: ProcessGroup, num_lanes: int) -> Sequence[ProcessGroup]:
    """A group of the same processes for each device of a pipeline.

    Collectives of a group have to be called in the same order by all of its processes. Devices do
    not wait for each other, so what two of them call has no order; each device has that of its row.

    To be called by all of the group's processes, for pipelines in the same order.
    """
    return [_like(group) for _ in range(num_lanes)]


def control_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same processes for what the host alone has to know: tensors on the CPU."""
    return _like(group, backend="gloo")


def _like(group: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    found: Any = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend=backend or _backend_of(group),
        use_local_synchronization=True,
    )
    return cast(ProcessGroup, found)


def _backend_of(group: ProcessGroup) -> str:
    """By one name where it is the same for all devices: of several, torch may find none first."""
    given = dist.get_backend_config(group)
    names = {part.rpartition(":")[2] for part in given.split(",")}
    return names.pop() if len(names) == 1 else given


class _Closed:
    """What torch counts in place of a group that has been given back.

    Torch names a group by its ranks and by how many groups the process has. A name that comes again
    would have the next group find in the store where the processes of the first were listening. So
    the count only grows; it also stays the same in processes that close a pipeline and in others
    that keep theirs.
    """

    def shutdown(self) -> None:
        """There is nothing left; torch asks for it when everything ends."""

    abort = shutdown

    def _get_backend(self, _: object) -> None:
        # Earlier versions of torch ask for it, and take this for a group without GPUs.
        raise RuntimeError("the group has been given back")


def give_back(groups: Iterable[ProcessGroup]) -> None:
    """Destroys groups that were made here, as far as they have not gone with torch.distributed."""
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
    """Around what all processes of a group do to make their pipelines.

    Raises:
        PeerError: one has not come in time, or is gone.
    """
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(
            "a process of the group has not come to make its pipeline within "
            f"{timeout_of(group).total_seconds():g} s, or is gone: {error}"
        ) from error


def timeout_of(group: ProcessGroup) -> timedelta:
    """For how long a collective of the group waits for its peers.

    A mesh makes groups that wait for half an hour, whatever `init_process_group` was told.
    """
    return min(_timeout(group), _timeout(cast(ProcessGroup, dist.group.WORLD)))


def _timeout(group: ProcessGroup) -> timedelta:
    of_backend: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return of_backend
