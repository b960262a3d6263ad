"""All that a user asks of a pipeline, checked argument by argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from typing import Any, Literal, get_args

from torch import nn
from torch.export import ExportedProgram

from ..budget.budget import Budget
from ..modes import threads_of_a_worker
from ..one_of import require_one_of
from ..parallel.peers.groups import Peers
from ..parallel.tensor.tensor import TensorParallelism
from ..partition.balance import Balance
from ..partition.split_points import SplitAt
from ..plan.shares import Shares
from ..runtime.asynchronous.optimizers import MakeOptimizer
from ..runtime.devices import DeviceLane, Devices, parse_devices
from ..runtime.features.finite import CheckFinite
from ..runtime.gpu.capture.policy import Capture
from ..runtime.gpu.issuing import Issuing
from ..runtime.loss import Loss
from ..runtime.timeout import refuse_timeout
from ..verify import Verify, parse_verify
from .arguments import refuse_unknown_options
from .choose_levels import RecomputeArgument
from .choose_plan import Schedule

BatchReduction = Literal["mean", "sum"]
# torch compiles whole stages, or only the layers that the user has compiled.
Compile = Literal[False, "stages"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `Pipeline` and of `AsyncPipeline`, whose docstrings describe them.

    Attributes:
        optimizer: of an `AsyncPipeline`; None for a `Pipeline`.
        options: for the schedule.

    Raises:
        TypeError, ValueError: an argument is wrong by itself.
    """

    model: nn.Module | Sequence[nn.Module] | ExportedProgram
    devices: Devices
    schedule: Schedule
    microbatches: int | None = None
    replicas: int = 1
    loss_fn: Loss | None = None
    reduction: BatchReduction = "mean"
    balance: Balance | None = None
    sample: Any = None
    split_at: SplitAt | None = None
    whole: Sequence[str] = ()
    capture: Capture = False
    issue: Issuing = "caller"
    recompute: RecomputeArgument | Budget = None
    check_finite: CheckFinite = "off"
    deferred_batch_norm: bool = False
    process_group: Peers | None = None
    optimizer: MakeOptimizer | None = None
    tensor_parallel: TensorParallelism | None = None
    verify: bool | int | Verify = False
    timeout: float | None = None
    compile: Compile = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments = [each.name for each in fields(self) if each.name != "options"]
        if "optimizer" in self.options:
            raise TypeError(
                "optimizer must be left out of Pipeline: call optimizer.step() after its steps. A "
                "pykern.AsyncPipeline takes an optimizer, which its steps call"
            )
        refuse_unknown_options(self.schedule, self.options, arguments)
        if self.devices is None:
            raise TypeError("devices must be given, got None. For example devices='cpu:4'")
        _require_loss(self.loss_fn)
        require_one_of("reduction", self.reduction, get_args(BatchReduction))
        if not isinstance(self.deferred_batch_norm, bool):
            raise TypeError(
                f"deferred_batch_norm must be True or False, got {self.deferred_batch_norm!r}"
            )
        require_one_of("check_finite", self.check_finite, get_args(CheckFinite))
        require_one_of("capture", self.capture, (False, True, "auto", "step"))
        require_one_of("issue", self.issue, get_args(Issuing))
        require_one_of("compile", self.compile, get_args(Compile))
        refuse_timeout(self.timeout)
        # These values are computed now, so that errors in their arguments are raised now.
        _ = self.verified, self.shares, self.memory

    @cached_property
    def verified(self) -> Verify | None:
        """The steps that are verified, and how; None without verification."""
        return parse_verify(self.verify)

    @cached_property
    def lanes(self) -> Sequence[DeviceLane]:
        """The devices."""
        return parse_devices(self.devices)

    @cached_property
    def shares(self) -> Shares:
        """The devices and microbatches of each replica."""
        return Shares(len(self.lanes), self.microbatches, self.replicas)

    @cached_property
    def speeds(self) -> list[float] | None:
        """The speed of each device; None if all are equal."""
        speeds = [lane.speed for lane in self.lanes]
        return speeds if len(set(speeds)) > 1 else None

    @cached_property
    def memory(self) -> list[float] | None:
        """The bytes that each device has for its stages; None if none tells."""
        if all(lane.memory is None for lane in self.lanes):
            return None
        if self.balance not in ("time", "memory"):
            raise ValueError(
                "memory of a device must go with balance='time' or 'memory', which count bytes, "
                f"got balance={self.balance!r}. Omit it, or take such a balance"
            )
        return [inf if lane.memory is None else lane.memory for lane in self.lanes]

    @property
    def is_cut_by_time(self) -> bool:
        """Whether layers are shared out by what they take."""
        is_rule = self.balance is None or isinstance(self.balance, str | Mapping)
        return is_rule and self.balance != "memory" and self.split_at is None

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are GPUs."""
        return self.lanes[0].device.type != "cpu"

    def threads(self) -> AbstractContextManager[None]:
        """A context with the intra-op threads of a worker; of the caller where devices are GPUs."""
        return threads_of_a_worker(1 if self.on_gpus else len(self.lanes))


def _require_loss(loss: object) -> None:
    if isinstance(loss, type):
        raise TypeError(
            f"loss_fn must be a function of (output, target), got the class {loss.__name__}. Make "
            f"the loss first: {loss.__name__}()"
        )
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss_fn must be a function of (output, target), got {loss!r}. Give the function, "
            "such as torch.nn.functional.mse_loss"
        )
