"""From a request to the parts of a pipeline: choices first (`design`), then parts (`build`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .. import _C
from ..budget.budget import Budget
from ..budget.fit import Fitted
from ..budget.level_costs import StageCosts
from ..parallel.data.data import DataParallel
from ..parallel.distributed import refuse_distributed
from ..parallel.peers.agreement import alike
from ..parallel.peers.first import of_first
from ..parallel.peers.groups import group_of
from ..parallel.peers.likeness import likeness
from ..parallel.tensor.tensor import TensorParallel, parse_tensor
from ..partition.balance import Partition
from ..partition.chain import Chain, RecordedChain, max_stages, open_model, share_out
from ..partition.layers import make_stages, place_layers, refuse_foreign_devices, refuse_inside
from ..partition.profile import kept_state
from ..partition.unequal import StageDevices, improved, stage_memory, stage_speeds
from ..plan import Plan
from ..plan.parts import Parts
from ..runtime.asynchronous.executor import AsyncExecutor
from ..runtime.asynchronous.optimizers import make_optimizer
from ..runtime.cpu.workers import Workers
from ..runtime.driver import Driver
from ..runtime.executor import Executor
from ..runtime.features.batch_norm import DeferredBatchNorm
from ..runtime.features.beside import Beside
from ..runtime.features.compiled import CompiledStages
from ..runtime.features.early_updates import EarlyUpdates
from ..runtime.features.feature import Feature, Features, Made
from ..runtime.features.finite import Checks
from ..runtime.features.frozen import Frozen
from ..runtime.features.order_of_writes import OrderOfWrites
from ..runtime.features.scaler import Scaler
from ..runtime.gpu.issuing import Issuer
from ..runtime.gpu.streams import Streams
from ..runtime.stage.stage import Stage
from ..verify import Subject, Verifier
from .auto_costs import options_of
from .choose_levels import Levels, choose_levels
from .choose_plan import choose_parts, choose_plan
from .combinations import OUTSIDE, refuse_combinations, refuse_layers, refused_with
from .model_face import Adopted
from .request import Request

# Makes a feature, for the module of the pipeline, or returns None if it is not in force.
MakeFeature = Callable[["Design", nn.Module], Feature | None]


@dataclass(frozen=True)
class Design:
    """The choices for a request, before anything is started or changed.

    Attributes:
        asked: the request.
        plan: the plan of training steps.
        levels: the recompute levels: what each forward keeps for its backward.
        parts: the parts of a plan without an end; None for a plan that ends.
        chain: the model.
        partition: the layers of each stage.
        data_group: the data-parallel processes; None without data parallelism.
        tensor_group: the tensor-parallel processes; None without tensor parallelism.
        more: makes further features, behind all others.
    """

    asked: Request
    plan: Plan
    levels: Levels
    parts: Parts | None
    chain: Chain | RecordedChain
    partition: Partition
    data_group: ProcessGroup | None
    tensor_group: ProcessGroup | None
    more: Sequence[MakeFeature] = ()

    @property
    def peers(self) -> list[ProcessGroup]:
        """All groups of other processes."""
        return [group for group in (self.data_group, self.tensor_group) if group is not None]

    def stages(self) -> list[list[nn.Module]]:
        """The layers of each stage."""
        layers = list(self.chain.layers.values())
        return [layers[span.start : span.stop] for span in self.partition.stages]


@dataclass
class Built(Made):
    """The parts of a pipeline.

    Attributes:
        levels: the recompute levels: what each forward keeps for its backward.
        fitted: the levels that a `Budget` has chosen; None without a `Budget`.
        optimizer: the optimizer that the steps call; None if the caller steps an optimizer.
        features: the features, which steps run beside their actions.
    """

    levels: Levels
    fitted: Fitted | None
    optimizer: Optimizer | None
    features: Features


def _checks(of: Design, _: nn.Module) -> Feature | None:
    level = of.asked.check_finite
    return None if level == "off" else Checks(level, list(of.chain.layers), of.partition.stages)


def _frozen(of: Design, _: nn.Module) -> Feature | None:
    return Frozen(of.plan) if 0 < of.plan.first_trained < of.plan.num_stages else None


def _tensor(of: Design, model: nn.Module) -> Feature | None:
    if of.asked.tensor_parallel is None or of.tensor_group is None:
        return None
    styles = of.asked.tensor_parallel[1]
    return TensorParallel(of.tensor_group, styles, of.plan, model, of.stages())


def _verifier(of: Design, _: nn.Module) -> Feature | None:
    asked = of.asked
    subject = partial(Subject, of.chain, of.partition, asked.reduction, asked.deferred_batch_norm)
    return None if asked.verified is None else Verifier(asked.verified, subject)


# One line for each feature. In this order features wrap actions (the
# last outermost), enter steps (the first outermost) and begin; they finish and close in
# reverse. Tensor parallelism comes before data parallelism, whose sums are over whole gradients;
# features that look at arguments follow those that change layers; repeaters of steps come last.
FEATURES: Sequence[MakeFeature] = (
    lambda of, _: Scaler(refused_with("scaler", of.asked)),
    _checks,
    _frozen,
    lambda of, _: EarlyUpdates(in_processes=of.asked.process_group is not None),
    lambda of, _: OrderOfWrites(in_replicas=of.plan.placement.num_replicas > 1),
    lambda of, _: DeferredBatchNorm() if of.asked.deferred_batch_norm else None,
    _tensor,
    lambda of, model: None if of.data_group is None else DataParallel(of.data_group, model),
    lambda of, _: CompiledStages() if of.asked.compile else None,
    lambda of, _: Beside(of.asked.loss_fn, of.chain.origins),
    _verifier,
)


def design(asked: Request) -> Design:
    """Chooses the plan of a request and cuts its model.

    Raises:
        TypeError, ValueError, CutError, PlanError: the request cannot be met; see `Pipeline`.
        RuntimeError: this child was forked while a stage ran, whose locks are never released here.
    """
    _C.refuse_after_hasty_fork()
    refuse_inside(asked.model, Adopted)
    refuse_distributed(asked.model)
    refuse_foreign_devices(asked.model, asked.lanes[0].device.type)
    refuse_combinations(asked)
    peers = asked.process_group
    data_group = None if peers is None else group_of(peers, "process_group")
    parts, plan = None, None
    if asked.optimizer is not None:
        parts = choose_parts(asked.schedule, asked.shares, asked.options)
        plan = parts.plan
    if plan is None:
        joined = peers is not None or asked.tensor_parallel is not None
        num_layers = max_stages(asked.model)
        alone = asked.loss_fn is None and asked.replicas == 1
        outside = alone and refused_with(OUTSIDE, asked) is None
        options = options_of(asked, data_group)
        plan = choose_plan(asked.schedule, asked.shares, num_layers, options, joined, outside)
    levels = None if isinstance(asked.recompute, Budget) else asked.recompute
    plan, chosen = choose_levels(plan, levels)
    refuse_combinations(asked, plan)
    tensor_group = parse_tensor(asked.tensor_parallel)
    chain = open_model(asked.model, asked.sample, plan.num_stages, asked.split_at, asked.whole)
    of = partial(Design, asked, plan, chosen, parts, chain)
    speeds = None if asked.speeds is None else stage_speeds(plan, asked.speeds)
    memory = None if asked.memory is None else stage_memory(plan, asked.memory)
    how = asked.balance, asked.sample, asked.split_at, StageDevices(speeds, memory)
    share = partial(share_out, chain, plan.num_stages, *how)
    groups = [group for group in (data_group, tensor_group) if group is not None]
    if asked.balance == "time":
        # On GPUs too, times are those of the CPU.
        with asked.threads():
            cut = of_first(groups, share, Partition)
    else:
        cut = share()
    if asked.speeds is not None and asked.is_cut_by_time:
        cut = improved(cut, plan, asked.speeds)
    refuse_layers(asked, plan, chain.layers, cut)
    return of(cut, data_group, tensor_group)


def build(of: Design, model: nn.Module) -> Built:
    """Places the layers of a design, and makes the driver, executor and features that run them.

    Raises:
        BaseException: a part cannot be made; all parts that were started have been closed.
    """
    makers = *FEATURES, *of.more
    features = Features([made for make in makers if (made := make(of, model)) is not None])
    asked, plan, levels, fitted = of.asked, of.plan, of.levels, None
    with ExitStack() as undo:
        driver = _open_driver(asked)
        undo.callback(driver.close)
        undo.callback(features.close)
        devices = [driver.device(lane) for lane in range(plan.num_devices)]
        stages = _place(of, model, driver, devices, features)
        if isinstance(asked.recompute, Budget):
            fitted = _fit(of, asked.recompute, stages)
            plan, levels = fitted.plan, cast("Levels", fitted.by_microbatch())
        executor = _open_executor(of, plan, stages, devices, driver)
        optimizer = None
        if asked.optimizer is not None and isinstance(executor, AsyncExecutor):
            optimizer = make_optimizer(asked.optimizer, model.parameters())
            executor.update_by(optimizer)
        of.chain.before_recording(executor.settle)
        told = partial(_told, of, plan, model)
        built = Built(executor, plan, told, executor, levels, fitted, optimizer, features)
        for feature in features:
            feature.attach(built)
        undo.pop_all()
    return built


def _open_driver(asked: Request) -> Driver:
    """The driver of the devices; raises RuntimeError if GPUs cannot be used."""
    if asked.lanes[0].device.type != "cpu":
        issuer = Issuer(len(asked.lanes) if asked.issue == "threads" else 0)
        return Streams(asked.lanes, asked.capture, asked.timeout, issuer)
    return Workers(len(asked.lanes), asked.timeout)


def _place(
    of: Design,
    model: nn.Module,
    driver: Driver,
    devices: Sequence[torch.device],
    features: Features,
) -> list[Stage]:
    """Moves the layers to their devices, and makes stages of them."""
    chain, plan, cut = of.chain, of.plan, of.partition
    homes = [devices[device] for device in plan.placement.replicas[0]]
    place_layers(chain.layers, cut, homes)
    chain.cut(cut.stages, homes, driver.direct(plan))
    for feature in features:
        feature.place(model, homes[0].type, partial(_told, of, plan, model))
    chain.forget()
    return make_stages(list(chain.layers.values()), cut, homes)


def _fit(of: Design, asked: Budget, stages: Sequence[Stage]) -> Fitted:
    """The levels that fit into a budget, from the first process's measurements."""
    budget = replace(asked, sample=of.chain.first_arguments(asked.sample))
    measure = partial(budget.measure, of.plan, stages, of.asked.loss_fn)
    # Layers that are recorded do not have the model's own attributes.
    roots = [] if of.chain.root is None else [of.chain.root]
    with of.asked.threads(), kept_state(roots):
        costs = of_first(of.peers, measure, list[StageCosts])
    return budget.fit(of.plan, costs)


def _open_executor(
    of: Design, plan: Plan, stages: Sequence[Stage], devices: Sequence[torch.device], driver: Driver
) -> Executor:
    """The executor of the plan, or of the parts of a plan without an end."""
    if of.parts is None:
        return Executor(stages, plan, devices, driver)
    assert isinstance(driver, Workers)
    return AsyncExecutor(stages, of.parts, driver, mean=of.asked.reduction == "mean")


def _told(of: Design, plan: Plan, model: nn.Module) -> Mapping[str, str]:
    """The texts that must be equal in the pipelines of all processes."""
    told = {"reduction": of.asked.reduction, "the loss function": likeness(of.asked.loss_fn)}
    return told | alike(plan, of.partition, model)
