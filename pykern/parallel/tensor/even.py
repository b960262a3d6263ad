"""Shards that go on as plain tensors: all must be of one size, as torch takes them to be.

torch makes a DTensor of a plain shard as if every process had one of that size. Shards of other
sizes end in its matrix products, or in collectives that do not match.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

# The last dimension, whose size is known before any output.
_FEATURES = -1


def refuse_uneven(name: str, module: nn.Module, style: Any, num_processes: int) -> None:
    """Refuses a module whose features are handed on in plain shards of unequal sizes.

    Raises:
        ValueError: the processes do not divide the features.
    """
    if _plain_shards(style) == _FEATURES:
        features: Any = getattr(module, "out_features", None) or module.embedding_dim
        _require_multiple(f"the features of {name}", features, num_processes)


def watch_output(name: str, module: nn.Module, style: Any, num_processes: int) -> None:
    """Has the module refuse outputs, such as of a sequence, in whose plain shards sizes differ."""
    dim = _plain_shards(style)
    if dim is not None and dim != _FEATURES:
        # Before torch's own hook, which makes the output a plain shard.
        hook = partial(_look, f"dimension {dim} of the output of {name}", dim, num_processes)
        module.register_forward_hook(hook, prepend=True)


def _look(what: str, dim: int, num_processes: int, *call: Any) -> None:
    output: Tensor = call[-1]
    _require_multiple(what, output.shape[dim], num_processes)


def _plain_shards(style: Any) -> int | None:
    """The dimension in which a style hands on an output in plain shards; None if it does not."""
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - takes long
        ColwiseParallel,
        RowwiseParallel,
    )

    if type(style) not in (ColwiseParallel, RowwiseParallel) or not style.use_local_output:
        return None
    (layout,) = style.output_layouts
    return layout.dim if layout.is_shard() else None


def _require_multiple(what: str, size: int, num_processes: int) -> None:
    if size % num_processes:
        raise ValueError(
            f"{what} must be a multiple of {num_processes}, the number of processes, to be handed "
            f"on in plain shards, got {size}. Pad it, or give the style use_local_output=False or "
            "output_layouts=Replicate()"
        )
