"""The model, the batches and the devices that a pipeline is tuned for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..boxes import Box
from ..cgroup import usable_cores
from ..partition.chain import RecordedChain, call_of
from ..partition.layers import refuse_foreign_devices, refuse_lazy
from ..pipeline.arguments import require_functions, require_target
from ..pipeline.pipeline import Pipeline
from ..pipeline.tuned import STANDS_FOR
from ..plan import Plan, require_counts
from ..runtime.devices import DeviceLane, Devices, parse_devices
from ..runtime.loss import Loss
from ..runtime.microbatch import batch_size
from ..runtime.stage.replica import refuse_replicas, refuse_trained_loss
from ..sizes.with_values import WithValues
from ..sizes.without_values import WithoutValues
from ..tensors.parameters import held_by
from ..tensors.trees import Call, all_tensors, map_tensors
from .site import Site, at_hand, on_box
from .units import Units, units_of


@dataclass(frozen=True)
class Asked:
    """The arguments of `tune`, which its docstring describes.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    model: nn.Module | Sequence[nn.Module]
    sample: Any
    loss_fn: Loss
    devices: Devices
    target: Any = None
    batch_size: int | None = None
    memory: float | None = None
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    whole: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    box: Box | None = None

    def __post_init__(self) -> None:
        require_functions(self.loss_fn, self.optimizer)
        require_target(self.loss_fn, self.target)
        memory = 1 if self.memory is None else self.memory
        if not (isinstance(memory, Real) and memory > 0):
            raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
        refuse_chosen(self.more)
        if self.batch_size is not None:
            require_counts(batch_size=self.batch_size)
        gpus = self.gpus
        if len(set(gpus)) < len(gpus) or any(lane.num_parts > 1 for lane in self._lanes):
            raise ValueError(
                f"devices must be CPU workers or whole GPUs, each once, got {self.devices!r}. For "
                "parts of a GPU, measure with pipe.costs() within pipe.tracing()"
            )
        if any(lane.speed != 1 or lane.memory is not None for lane in self._lanes):
            raise ValueError(
                "devices must have no speed or memory of their own for tune, which takes them to "
                f"be alike, got {self.devices!r}. Give a pykern.Pipeline these"
            )
        _ = self.rows_of_sample, self.site
        refuse_lazy(self.model)
        refuse_foreign_devices(self.model, self._lanes[0].device.type)

    @cached_property
    def rows_of_sample(self) -> int:
        """The number of rows of the sample and the target."""
        return batch_size({"sample": self.sample, "target": self.target})

    @property
    def rows(self) -> int:
        """The number of rows of a batch."""
        return self.rows_of_sample if self.batch_size is None else self.batch_size

    @cached_property
    def _lanes(self) -> list[DeviceLane]:
        return parse_devices(self.devices)

    @property
    def num_devices(self) -> int:
        """The number of devices at hand, which are measured."""
        return len(self._lanes)

    @property
    def names(self) -> list[str]:
        """The name of each of them."""
        return [str(lane.device) for lane in self._lanes]

    @property
    def gpus(self) -> list[torch.device]:
        """They themselves, if they are GPUs."""
        return [lane.device for lane in self._lanes if lane.device.type == "cuda"]

    @property
    def num_cores(self) -> int:
        """The number of devices that compute at once."""
        return self.num_devices if self.gpus else min(self.num_devices, usable_cores())

    @cached_property
    def site(self) -> Site:
        """The devices that plans are searched for."""
        if self.box is None:
            return at_hand(self.names, self.memory)
        return on_box(self.box, self.names, self.memory)

    @cached_property
    def memory_of_each(self) -> float | None:
        """The bytes that each device at hand has."""
        return self.site.memory if self.box is None else at_hand(self.names).memory

    @cached_property
    def units(self) -> Units:
        """The units of the model, at which stages can begin."""
        return units_of(self.model, self.sample, len(self.site.names), self.whole)

    @cached_property
    def subject(self) -> tuple[str, ...]:
        """The devices of plans, and what the model and a row of the batch hold, as text."""
        # Parameters that train are told a second time, so that frozen ones differ.
        held = [held_by(layers) for layers in self.units.modules()]
        tensors = [tensor for of_unit in held for kind in of_unit for tensor in kind]
        given = all_tensors((self.sample, self.target))
        return (
            *self.site.names,
            *(f"{one.dtype} {tuple(one.shape)}" for one in tensors),
            *(f"{one.dtype} {tuple(one.shape[1:])}" for one in given),
        )

    @cached_property
    def can_have_replicas(self) -> bool:
        """Whether the layers and the loss can run in several replicas."""
        try:
            refuse_replicas(self.units.chain.layers)
            refuse_trained_loss(self.loss_fn)
        except ValueError:
            return False
        return True

    def batch(self, rows: int) -> tuple[Call, Any]:
        """Inputs and target of `rows` rows: the sample's rows, repeated as often as needed."""
        chosen = torch.arange(rows) % self.rows_of_sample

        def taken(tensor: Tensor) -> Tensor:
            return tensor.detach()[chosen] if tensor.dim() > 0 else tensor

        call, target = map_tensors(taken, (call_of(self.sample), self.target))
        return call, target

    @contextmanager
    def on_cpu(self, copies: WithValues | WithoutValues) -> Iterator[Asked]:
        """A twin whose model and batch are such copies, to count bytes without a GPU."""
        twin = replace(
            self,
            model=copies.model(self.model),
            sample=copies.batch(self.sample),
            target=copies.batch(self.target),
        )
        with copies.in_force():
            yield twin

    def wait(self) -> None:
        """Waits until all GPUs have done what they were given."""
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)

    def pipeline(self, plan: Plan, spans: Sequence[range], **more: Any) -> Pipeline:
        """A pipeline with stages of these units."""
        return Pipeline(
            self.model,
            **{
                "devices": self.names[: plan.num_devices],
                "schedule": plan,
                "loss_fn": self.loss_fn,
                "sample": self.sample if isinstance(self.units.chain, RecordedChain) else None,
                "split_at": self.units.split_at(spans),
                "whole": self.whole,
                **self.more,
                **more,
            },
        )


def refuse_chosen(more: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of a pipeline that `tune` chooses."""
    for name in STANDS_FOR:
        if name in more:
            raise ValueError(
                f"{name} must be left out of tune, which chooses it, got {more[name]!r}. "
                "Give it to a pykern.Pipeline"
            )
