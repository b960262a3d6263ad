"""Gradient sums over processes, each kept only in the process that owns the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...tensors.parameters import gradient_dtype
from .buckets import GradientSum, flat_gradients, size_of


class GradientShare(GradientSum):
    """A reduce-scatter: each process gets the gradient sums of the parameters that it owns.

    The other gradients are dropped afterwards, which frees their memory.

    Args:
        parameters: the parameters that train, each once.
        group: the process group of the device.
        owner_of: the rank in the group that owns each parameter's sum.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: ProcessGroup,
        owner_of: Mapping[Tensor, int],
    ) -> None:
        super().__init__(parameters, group)
        # By type, then by owner.
        self._shares = [
            [
                [p for p in parameters if gradient_dtype(p) == dtype and owner_of[p] == owner]
                for owner in range(group.size())
            ]
            for dtype in dict.fromkeys(map(gradient_dtype, parameters))
        ]
        self._counts: Tensor | None = None
        # This process's sums, by type.
        self._sums: list[Tensor] = []

    def launch(self) -> None:
        """Starts to sum the gradients in `.grad`, after the work on the current stream.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._refuse_sparse()
        self._scatter(self._found(), flat_gradients)

    def complete(self) -> None:
        """Takes part, with zeros, in the collectives that have not been started."""
        nothing = torch.zeros(len(self._parameters), dtype=torch.float32, device=self._device)
        self._scatter(nothing, self._zeros)

    def _scatter(self, found: Tensor, flat: Callable[[Sequence[Tensor]], Tensor]) -> None:
        if not self._parameters:
            return
        if self._counts is None:
            self._counts = found
            self._note(dist.all_reduce(found, group=self._group, async_op=True))
        for by_owner in self._shares[len(self._sums) :]:
            pieces = [flat(share) if share else self._nothing(by_owner) for share in by_owner]
            self._sums.append(self._reduce_scatter(pieces))

    def _nothing(self, by_owner: Sequence[Sequence[Tensor]]) -> Tensor:
        """The piece of a rank that owns nothing: one value, as some backends need at least one."""
        dtype = next(gradient_dtype(parameter) for share in by_owner for parameter in share)
        return torch.zeros(1, dtype=dtype, device=self._device)

    def _zeros(self, share: Sequence[Tensor]) -> Tensor:
        num_values = sum(map(size_of, share))
        return torch.zeros(num_values, dtype=gradient_dtype(share[0]), device=self._device)

    def _reduce_scatter(self, pieces: list[Tensor]) -> Tensor:
        mine = self._group.rank()
        if self._device.type == "cpu":
            # Gloo's reduce_scatter would all-reduce every piece, and cannot be asked whether it is
            # done. So each piece is reduced to its owner instead.
            for owner, piece in enumerate(pieces):
                self._note(dist.reduce(piece, group=self._group, group_dst=owner, async_op=True))
            return pieces[mine]
        into = torch.empty_like(pieces[mine])
        self._note(dist.reduce_scatter(into, pieces, group=self._group, async_op=True))
        return into

    def finish(self) -> None:
        """Puts this process's finished sums into `.grad`; drops the other gradients."""
        if self._counts is None:
            return
        has = self._having(self._counts)
        for by_owner, sums in zip(self._shares, self._sums, strict=True):
            for owner, share in enumerate(by_owner):
                if owner != self._group.rank():
                    for parameter in share:
                        parameter.grad = None
                else:
                    self._take(share, sums, has)
        self._sums.clear()


class Owners:
    """The owner of each gradient's sum; until `share_out`, every process gets every sum.

    Args:
        group: the processes of the pipeline.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._owner_of: Mapping[Tensor, int] | None = None
        self._scaler_is_refused = ""

    def share_out(self, owner_of: Mapping[Tensor, int], refused: str = "") -> None:
        """Gives each sum to one process from the next step on; all processes must call it.

        Args:
            owner_of: the owner's rank in the group, for every parameter that trains.
            refused: the reason why a scaler cannot check such gradients; empty if it can.
        """
        self._owner_of = owner_of
        self._scaler_is_refused = refused

    def keep_once(self, parameters: Iterable[Tensor]) -> None:
        """Keeps one copy of each summed gradient: in its owner, or in the first process.

        Raises:
            RuntimeError: a parameter trains, but has no owner.
        """
        for parameter in parameters:
            if parameter.requires_grad and self._keeper_of(parameter) != self._rank:
                parameter.grad = None

    def _keeper_of(self, parameter: Tensor) -> int:
        if self._owner_of is None:
            return 0
        if parameter not in self._owner_of:
            raise RuntimeError(
                "parameters that train must belong to the ZeroOptimizer, got one of shape "
                f"{tuple(parameter.shape)} that does not. Add it by add_param_group, in every "
                "process"
            )
        return self._owner_of[parameter]

    def sum_of(self, parameters: Sequence[Tensor], group: ProcessGroup) -> GradientSum:
        """The sum of some parameters' gradients in the next step.

        Raises:
            RuntimeError: a parameter trains, but has no owner.
        """
        if self._owner_of is None:
            return GradientSum(parameters, group)
        owner_of = {parameter: self._keeper_of(parameter) for parameter in parameters}
        return GradientShare(parameters, group, owner_of)

    def require_scaler(self, scaler: object) -> None:
        """Refuses a scaler that would check only the gradients of this process.

        Raises:
            TypeError: the scaler checks one process only, or no scaler can be used at all.
            ValueError: the scaler checks other processes than those of the pipeline.
        """
        if scaler is None or self._owner_of is None:
            return
        if self._scaler_is_refused:
            raise TypeError(f"scaler must be None here, got one: {self._scaler_is_refused}")
        from torch.distributed.fsdp.sharded_grad_scaler import (  # noqa: PLC0415 - takes long
            ShardedGradScaler,
        )

        if not isinstance(scaler, ShardedGradScaler):
            raise TypeError(
                "scaler must be a ShardedGradScaler of torch.distributed.fsdp with a "
                f"ZeroOptimizer, got a {type(scaler).__name__}, which would look for infinite "
                "values in one process alone"
            )
        if not scaler.is_enabled():
            return
        theirs = dist.get_process_group_ranks(scaler.process_group)
        if theirs != dist.get_process_group_ranks(self._group):
            raise ValueError(
                "scaler must check the processes of the pipeline, got one that waits for processes "
                f"{theirs}. Make ShardedGradScaler(process_group=...) with the pipeline's group"
            )
