"""The groups of a pipeline's devices."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pykern.parallel.peers.groups import control_group, group_of, lane_groups, timeout_of
from tests import peers


def of_a_mesh(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        TypeError,
        match=r"must be a process group or a mesh of one dimension, as mesh\['dp'\] is, got a mesh "
        r"of 2: \('dp', 'tp'\)",
    ):
        group_of(mesh, "process_group")
    group = group_of(mesh["dp"], "process_group")
    lanes = [*lane_groups(group, 2), control_group(group)]
    values = []
    for number, lane in enumerate(lanes):
        assert dist.get_process_group_ranks(lane) == dist.get_process_group_ranks(group)
        # Not the mesh's half an hour.
        assert timeout_of(lane) == timedelta(seconds=20)
        value = torch.tensor([rank + 10 * number])
        # The order on other devices does not matter.
        dist.all_reduce(value, group=lane)
        values.append(value.item())
    return len({lane.group_name for lane in lanes}), values


def test_every_device_has_a_group_of_its_own() -> None:
    of_each = peers.run(4, of_a_mesh)
    assert of_each == [(3, [2, 22, 42]), (3, [4, 24, 44])] * 2


def of_processes_that_torch_has_bound_to_a_gpu(rank: int) -> Any:
    world: Any = dist.group.WORLD
    # As `init_process_group` does for a `device_id`.
    world.bound_device_id = torch.device("cuda", rank)
    groups: list[Any] = [*lane_groups(world, 2), control_group(world)]
    return [group.bound_device_id for group in groups], world.bound_device_id


def test_groups_are_for_all_gpus_of_a_process_that_torch_has_bound_to_one() -> None:
    """NCCL refuses tensors of another GPU than the one that its group is bound to."""
    of_each = peers.run(2, of_processes_that_torch_has_bound_to_a_gpu)
    assert of_each == [([None] * 3, torch.device("cuda", rank)) for rank in range(2)]


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match=r"process_group must be a process group .* got a str"):
        group_of("world", "process_group")
    with pytest.raises(
        ValueError, match="must be a group with this process in it, got one without"
    ):
        group_of(dist.GroupMember.NON_GROUP_MEMBER, "process_group")
