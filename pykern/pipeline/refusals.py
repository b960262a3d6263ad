"""Checks of arguments and of their combinations, which raise errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from .. import _C
from ..parallel.data.data import refuse_foreign_loss
from ..partition.layers import refuse_inside
from ..plan import Plan
from ..runtime.loss import Loss
from ..runtime.stage.replica import refuse_replicas, refuse_trained_loss


def refuse_others(
    model: Any, kind: type[nn.Module], reduction: object, deferred_batch_norm: object
) -> None:
    """Raises TypeError or ValueError for wrong arguments; `model` must not be of that kind.

    Raises RuntimeError in a child that was forked while a stage ran, before anything waits for a
    lock of that stage.
    """
    _C.refuse_after_hasty_fork()
    refuse_inside(model, kind)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
    if not isinstance(deferred_batch_norm, bool):
        raise TypeError(f"deferred_batch_norm is True or False, got {deferred_batch_norm!r}")


def refuse_unsummed(
    plan: Plan, layers: Mapping[str, nn.Module], loss_fn: Loss | None, group: ProcessGroup | None
) -> None:
    """Raises ValueError for layers and losses that replicas or processes do not support."""
    if plan.placement.num_replicas > 1:
        refuse_replicas(layers)
        refuse_trained_loss(loss_fn)
    if group is not None:
        refuse_foreign_loss(loss_fn, layers.values())
