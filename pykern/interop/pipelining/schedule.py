"""The base class of all schedules: stages and a plan, and `step` for whole batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ...plan import Action, Costs, Plan, simulate
from ...runtime.loss import Loss
from . import chunks, ranks
from .engine import Engine, Results
from .stage import Keywords, PipelineStage, takes

# Every action takes as long.
_EQUAL = Costs(1.0, 1.0, input_ns=1.0, weight_ns=1.0)


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a step. Lists have an entry for each microbatch."""

    schedule: PipelineSchedule
    arguments: Sequence[tuple[Any, ...]]
    keywords: Mapping[int, Sequence[Keywords]]
    results: Results


class PipelineSchedule:
    """The stages of this rank and the plan of all; outside `run` one rank has all stages.

    Gradients are summed over microbatches and, with `scale_grads`, divided by their number; what
    parameters have collected before is left as it is.
    """

    # Makes the plan from the number of devices, of microbatches and, for any chunks, of chunks.
    _order: ClassVar[Callable[..., Plan] | None] = None
    # Stages of a device; None where there may be any number.
    _chunks: ClassVar[int | None] = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None,
        specs: chunks.ChunkSpecs,
        scale_grads: bool,
    ) -> None:
        self._stages = _checked(stages)
        self._num_stages = stages[0].num_stages
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._specs = specs
        self.scale_grads = scale_grads
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._owners: list[PipelineSchedule] = []
        if self._order is not None:
            self._use(self._make_plan())

    @property
    def pipeline_order(self) -> dict[int, list[Action | None]]:
        """Actions of each rank, where every action takes one slot; None where the rank waits."""
        if self._plan is None:
            return {}
        order: dict[int, list[Action | None]] = {}
        for rank, row in enumerate(simulate(self._plan, _EQUAL).rows):
            order[rank] = []
            for span in row:
                idle = round(span.start_ns) - len(order[rank])
                order[rank] += [*([None] * idle), span.action]
        return order

    def step(  # noqa: PLR0913 - what torch's takes
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        finalize_gradients: bool = True,  # noqa: ARG002 - torch's, for sharded parameters
        **kwargs: Any,
    ) -> Any:
        """Forward and, with a loss function, backward of one whole batch.

        Args:
            *args: for the first stage, cut into microbatches; other ranks' are not used.
            target: for the loss, cut on dimension 0; only that of the last stage's rank is used.
            losses: a list to be filled with the loss of each microbatch, detached.
            return_outputs: whether the outputs are wanted.
            loss_kwargs: passed to every call of the loss function as they are.
            arg_mbs: pre-split args, a list with a tuple for each microbatch.
            kwarg_mbs: pre-split kwargs, a list with a dict for each microbatch.
            target_mbs: pre-split targets, a list with a target for each microbatch.
            finalize_gradients: not used, as in torch where parameters are not sharded.
            **kwargs: for those of the rank's stages whose forward names them, cut like args.

        Returns:
            The last stage's outputs, merged and detached; None for other ranks.

        Raises:
            RuntimeError: gradients are off, there is no target for the loss, no loss for `losses`
                or no plan, or the ranks do not agree on what to run.
            ValueError: the batch cannot be cut, or is given both whole and cut, or cut into another
                number of microbatches.
            TypeError: `losses` is not a list, no stage names a keyword argument, `arg_mbs` is not
                a list of tuples, or `kwarg_mbs` is not a list of dicts.
            BaseException: the first exception of a stage, the same object, with a note of where.
        """
        trains = self._loss_fn is not None
        if trains and not torch.is_grad_enabled():
            raise RuntimeError("grad mode must be on in step, got off. Call eval")
        batch = chunks.StepArguments(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        if trains and not batch.has_target and self._has_last:
            raise RuntimeError("target must be given, got None. Call step(x, target=y)")
        return self._step(trains, batch, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As `step`, forward only and without gradients; with a target, losses as well."""
        options = {
            "return_outputs": kwargs.pop("return_outputs", True),
            "loss_kwargs": kwargs.pop("loss_kwargs", None),
        }
        batch = chunks.StepArguments(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._step(False, batch, losses, **options)

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def _step(
        self,
        trains: bool,
        batch: chunks.StepArguments,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        self._known_plan()
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list, got {type(losses).__name__}")
        if losses is not None and self._has_last and self._loss_fn is None:
            raise RuntimeError("losses must be None without a loss_fn, got a list")
        if losses is not None and self._has_last and not batch.has_target:
            raise RuntimeError("losses must be None without a target, got a list. Give target=")
        count = self._n_microbatches
        arguments, by_microbatch = batch.arguments(count, self._specs)
        loss = self._loss_fn if batch.has_target else None
        if loss is not None and loss_kwargs:
            loss = partial(loss, **loss_kwargs)
        targets = []
        if loss is not None and self._has_last:
            targets = batch.targets(count)
        weight = (1 / count if self.scale_grads else 1.0) if trains else None
        results = Results(loss, targets, weight, keeps_outputs=return_outputs)
        part = RankPart(self, arguments, self._shared_out(by_microbatch), results)
        ranks.meet(part, _run)
        if not self._has_last:
            return None
        if losses is not None:
            losses[:] = [results.losses[number] for number in range(count)]
        if not return_outputs:
            return None
        outputs = [results.outputs[number] for number in range(count)]
        return chunks.merge(outputs, self._specs.outputs)

    def _shared_out(self, by_microbatch: Sequence[Keywords]) -> dict[int, Sequence[Keywords]]:
        """The keyword arguments that each stage names."""
        given = dict.fromkeys(name for keywords in by_microbatch for name in keywords)
        if not given:
            return {stage.stage_index: by_microbatch for stage in self._stages}
        named = {stage.stage_index: takes(stage.submod) for stage in self._stages}
        for name in given:
            if all(names is not None and name not in names for names in named.values()):
                raise TypeError(f"keywords must be named by a stage's forward, got {name!r}")
        return {
            index: [
                {name: value for name, value in each.items() if names is None or name in names}
                for each in by_microbatch
            ]
            for index, names in named.items()
        }

    def _make_plan(self) -> Plan:
        assert self._order is not None
        num_devices, name = self._count_devices(), type(self).__name__
        num_chunks, odd = divmod(self._num_stages, num_devices)
        if odd:
            raise ValueError(
                f"stages must be a multiple of the devices for {name}, got {self._num_stages} "
                f"stages for {num_devices} devices"
            )
        if self._chunks not in (None, num_chunks):
            raise ValueError(
                f"stages must be {self._chunks} on each device for {name}, got {self._num_stages} "
                f"stages for {num_devices} devices"
            )
        any_number = {"num_chunks": num_chunks} if self._chunks is None else {}
        return self._order(num_devices, self._n_microbatches, **any_number)

    def _count_devices(self) -> int:
        if self._stages[0].group_size > 1:
            return self._stages[0].group_size
        if self._chunks is not None:
            return max(1, self._num_stages // self._chunks)
        named = {stage.device for stage in self._stages}
        return self._num_stages if named == {torch.device("cpu")} else len(named)

    def _known_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(f"{type(self).__name__} has no plan yet. Call _load_csv first")
        return self._plan

    def _use(self, plan: Plan) -> None:
        """Takes a plan that is for these stages and microbatches."""
        size, rank = self._stages[0].group_size, self._stages[0].group_rank
        found = (plan.num_stages, plan.num_microbatches)
        if found != (self._num_stages, self._n_microbatches) or size not in (1, plan.num_devices):
            raise ValueError(
                f"the plan must be for {self._num_stages} stages, {self._n_microbatches} "
                f"microbatches and {size} ranks, got one for {plan.num_stages}, "
                f"{plan.num_microbatches} and {plan.num_devices} devices"
            )
        homes = enumerate(plan.placement.replicas[0])
        wanted = [stage for stage, device in homes if size == 1 or device == rank]
        given = sorted(stage.stage_index for stage in self._stages)
        if given != wanted:
            raise ValueError(
                f"stages must be {wanted} in rank {rank} of {size} for {type(self).__name__}, got "
                f"{given}"
            )
        self._plan, self._engine = plan, None

    def _engine_of(self, owners: list[PipelineSchedule]) -> Engine:
        """The engine that runs the stages of all these schedules, which are one per rank."""
        if self._engine is None:
            assert self._plan is not None
            stages = [stage for owner in owners for stage in owner._stages]
            stages.sort(key=lambda stage: stage.stage_index)
            self._engine, self._owners = Engine(stages, self._plan), owners
        if self._owners != owners:
            raise RuntimeError("all ranks must step the same schedule, got a rank in another one")
        return self._engine


def _checked(stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """The stages, of which there are some, of one pipeline."""
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stages must hold PipelineStages, got a {type(stage).__name__}")
    if not stages:
        raise ValueError("stages must hold at least one stage, got an empty list")
    counts = {stage.num_stages for stage in stages}
    if len(counts) > 1:
        raise ValueError(f"num_stages must be the same in all stages, got {sorted(counts)}")
    return list(stages)


def _run(parts: Sequence[RankPart | None]) -> Sequence[None]:
    """One step, to which every rank has brought its part; the last stage's has the results."""
    mine = [part for part in parts if part is not None]
    if len(mine) < len(parts):
        raise RuntimeError("all ranks must be in one step, got some in a barrier")
    kinds = {(type(part.schedule).__name__, part.results.weight) for part in mine}
    owners = [part.schedule for part in mine]
    if len(kinds) > 1 or any(owner._plan != owners[0]._plan for owner in owners):
        told = ", ".join(
            f"{name} with loss weight {weight}" for name, weight in sorted(kinds, key=str)
        )
        raise RuntimeError(f"all ranks must run the same plan in the same way, got {told}")
    engine = owners[0]._engine_of(owners)
    keywords = {stage: each for part in mine for stage, each in part.keywords.items()}
    (first,) = (part for part in mine if 0 in part.keywords)
    (last,) = (part for part in mine if part.schedule._has_last)
    engine.run(first.arguments, keywords, last.results)
    return [None] * len(parts)
