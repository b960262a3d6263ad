"""GPipe: a chain of layers on several devices, with its loss outside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NoReturn, Self, get_args

import torch
from torch import nn

from ...one_of import require_one_of
from ...pipeline import Pipeline
from ...runtime.recompute.recompute import Level
from .skip import Carries, Skippable, verify_skippables

Checkpoint = Literal["always", "except_last", "never"]
_Device = torch.device | int | str


class BalanceError(ValueError):
    """The balance does not fit the module or the devices."""


class GPipe(nn.Module):
    """A pipeline that is called as a module, in GPipe's order (Huang et al., 2019, 1811.06965).

    Args:
        module: a chain of layers; those that `skippable` was given may have skip connections.
        balance: the number of layers of each partition.
        devices: of the partitions; None for all GPUs, or as many CPU workers as partitions where
            there are no GPUs. "cpu" stands for a worker each time.
        chunks: how many microbatches a batch is cut into.
        checkpoint: which microbatches are computed once more in their backward.
        deferred_batch_norm: whether running statistics are those of full batches.

    Attributes:
        partitions: the layers of each partition.

    Raises:
        TypeError: the module is not an `nn.Sequential`, or skips do not match.
        BalanceError: the balance does not fit.
        IndexError: there are fewer devices than partitions.
        ValueError: another argument is wrong.
    """

    _pipe: Pipeline

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[_Device] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(f"module must be an nn.Sequential, got {type(module).__name__}")
        require_one_of("checkpoint", checkpoint, get_args(Checkpoint))
        self.balance = _checked(balance, len(module))
        self.devices = _chosen(devices, len(self.balance))
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"chunks must be a positive integer, got {chunks!r}")
        self.chunks = chunks
        self.checkpoint = checkpoint
        verify_skippables(module)
        # Not `named_children`, which leaves out a layer that occurs twice.
        layers = [(name, layer) for name, layer in module._modules.items() if layer is not None]
        self.partitions = nn.ModuleList(
            nn.Sequential(OrderedDict(layers[start:end]))
            for start, end in pairwise([0, *accumulate(self.balance)])
        )
        # Not as an attribute is set: its names would be the module's a second time.
        vars(self)["_pipe"] = Pipeline(
            _chain(layers),
            devices=[str(device) for device in self.devices]
            if self.devices[0].type != "cpu"
            else f"cpu:{len(self.devices)}",
            schedule="gpipe",
            microbatches=self.chunks,
            balance=self.balance,
            recompute=[_levels(checkpoint, self.chunks)] * len(self.balance),
            deferred_batch_norm=deferred_batch_norm,
        )

    def forward(self, batch: Any) -> Any:
        """The output for the batch, with a graph in grad mode: see `Pipeline.forward`."""
        return self._pipe(batch)

    def close(self) -> None:
        """Ends the workers; the layers stay usable."""
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    def cuda(self, device: Any = None) -> NoReturn:
        """Raises TypeError."""
        del device
        _refuse_to_move()

    def cpu(self) -> NoReturn:
        """Raises TypeError."""
        _refuse_to_move()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Changes the type of parameters; raises TypeError for another device."""
        types = all(isinstance(given, torch.dtype | bool) for given in (*args, *kwargs.values()))
        if not types:
            _refuse_to_move()
        return super().to(*args, **kwargs)


def _checked(balance: Iterable[int] | None, num_layers: int) -> list[int]:
    if not num_layers:
        raise BalanceError("module must have at least one layer, got an empty nn.Sequential")
    if balance is None:
        raise ValueError(
            "balance must be the number of layers of each partition, got None. Measure it with "
            "pykern.interop.torchgpipe.balance.balance_by_time"
        )
    counts = list(balance)
    whole = all(type(one) is int and one > 0 for one in counts)
    if not whole or sum(counts) != num_layers:
        raise BalanceError(
            f"balance must be positive ints with the sum {num_layers}, got {counts}. Measure it "
            "with pykern.interop.torchgpipe.balance.balance_by_time"
        )
    return counts


def _chosen(devices: Iterable[_Device] | None, count: int) -> list[torch.device]:
    if isinstance(devices, str):
        raise ValueError(
            f"devices must be a list, one for each partition, got {devices!r}. Give a list of names"
        )
    if devices is None:
        found = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
        found = found or [torch.device("cpu")] * count
    else:
        found = [torch.device(device) for device in devices]
    if len({device.type for device in found}) > 1:
        raise ValueError(f"devices must be GPUs or CPU workers, not both, got {found}")
    if len(found) < count:
        raise IndexError(f"devices must be at least {count}, one for each partition, got {found}")
    return found[:count]


def _chain(layers: Sequence[tuple[str, nn.Module]]) -> nn.Sequential:
    if not any(isinstance(layer, Skippable) for _, layer in layers):
        return nn.Sequential(OrderedDict(layers))
    return nn.Sequential(OrderedDict((name, Carries(layer)) for name, layer in layers))


def _levels(checkpoint: Checkpoint, chunks: int) -> list[Level | None]:
    last: Level | None = "stage" if checkpoint == "always" else None
    earlier: Level | None = None if checkpoint == "never" else "stage"
    return [earlier] * (chunks - 1) + [last]


def _refuse_to_move() -> NoReturn:
    raise TypeError(
        "a GPipe must stay on its devices, got a call that moves it. Make another with devices="
    )
