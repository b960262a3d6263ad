"""Gradients that are summed over processes, each in the one that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .buckets import GradientSum, flat_gradients, size_of


class GradientShare(GradientSum):
    """As a sum, but each process gets those of the parameters that it owns: a reduce-scatter.

    The other gradients are gone afterwards, and with them their memory.

    Args:
        parameters: that train, each once.
        group: of processes and the device.
        owner_of: the rank in the group of whom each parameter's sum is for.
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
                [p for p in parameters if p.dtype == dtype and owner_of[p] == owner]
                for owner in range(group.size())
            ]
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters)
        ]
        self._counts: Tensor | None = None
        # By type: this process's.
        self._sums: list[Tensor] = []

    def launch(self) -> None:
        """Starts the sums of what has been collected in `.grad`, behind the current stream.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._refuse_sparse()
        self._scatter(self._found(), flat_gradients)

    def complete(self) -> None:
        """Takes part, with zeros, in what has not been started."""
        self._scatter(torch.zeros(len(self._parameters), device=self._device), self._zeros)

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
        """For who owns nothing: one value, because not all backends send none."""
        dtype = next(parameter.dtype for share in by_owner for parameter in share)
        return torch.zeros(1, dtype=dtype, device=self._device)

    def _zeros(self, share: Sequence[Tensor]) -> Tensor:
        num_values = sum(map(size_of, share))
        return torch.zeros(num_values, dtype=share[0].dtype, device=self._device)

    def _reduce_scatter(self, pieces: list[Tensor]) -> Tensor:
        mine = self._group.rank()
        if self._device.type == "cpu":
            # Gloo makes one of as many sums that all processes get, and cannot be asked whether it
            # is done. To an owner each is what it takes.
            for owner, piece in enumerate(pieces):
                self._note(dist.reduce(piece, group=self._group, group_dst=owner, async_op=True))
            return pieces[mine]
        into = torch.empty_like(pieces[mine])
        self._note(dist.reduce_scatter(into, pieces, group=self._group, async_op=True))
        return into

    def finish(self) -> None:
        """Puts this process's sums, which have been waited for, into `.grad`; drops the others."""
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
    """Which process gets the sum of which gradient: all get all, until they are shared out.

    Args:
        rank: of this process in the group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._owner_of: Mapping[Tensor, int] | None = None
        self._scaler_is_refused = ""

    def share_out(self, owner_of: Mapping[Tensor, int], refused: str = "") -> None:
        """From the next step on, gives each sum to one process: to be called by all.

        Args:
            owner_of: the rank in the group, for every parameter that trains.
            refused: why no scaler can look at such gradients; empty where one can.
        """
        self._owner_of = owner_of
        self._scaler_is_refused = refused

    def keep_once(self, parameters: Iterable[Tensor]) -> None:
        """Of gradients that are the same in all processes, or in their owner, keeps one.

        Raises:
            RuntimeError: a parameter trains, and nobody owns it.
        """
        for parameter in parameters:
            if parameter.requires_grad and self._keeper_of(parameter) != self._rank:
                parameter.grad = None

    def _keeper_of(self, parameter: Tensor) -> int:
        if self._owner_of is None:
            return 0
        if parameter not in self._owner_of:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} trains that the ZeroOptimizer does "
                "not have: add it by add_param_group, in every process"
            )
        return self._owner_of[parameter]

    def sum_of(self, parameters: Sequence[Tensor], group: ProcessGroup) -> GradientSum:
        """What sums the gradients of some parameters in the next step.

        Raises:
            RuntimeError: a parameter trains, and nobody owns it.
        """
        if self._owner_of is None:
            return GradientSum(parameters, group)
        owner_of = {parameter: self._keeper_of(parameter) for parameter in parameters}
        return GradientShare(parameters, group, owner_of)

    def require_scaler(self, scaler: object) -> None:
        """Refuses a scaler that would look at the gradients of this process alone.

        Raises:
            TypeError: it is such a one, or cannot be used at all.
        """
        if scaler is None or self._owner_of is None:
            return
        if self._scaler_is_refused:
            raise TypeError(f"a scaler cannot be used here: {self._scaler_is_refused}")
        from torch.distributed.fsdp.sharded_grad_scaler import (  # noqa: PLC0415 - takes long
            ShardedGradScaler,
        )

        if not isinstance(scaler, ShardedGradScaler):
            raise TypeError(
                f"a {type(scaler).__name__} would look for infinite values in the gradients of one "
                "process alone: with a ZeroOptimizer use torch.distributed.fsdp's "
                "ShardedGradScaler, over all processes"
            )
