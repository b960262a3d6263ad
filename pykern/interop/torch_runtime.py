"""Plans on the runtime of torch.distributed.pipelining: a process for each device of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..parallel.peers.agreement import digest_of, require_alike
from ..parallel.peers.groups import control_group
from ..plan import Costs, Kind, Plan, check
from ..plan.files.torch_csv import require_sayable
from ..plan.files.torch_rows import rows_with_transfers, torch_waits
from ..plan.files.transfers import ORDER_COSTS, require_all_trained

try:
    from torch.distributed.pipelining.schedules import (
        _Action,
        _ComputationType,
        _PipelineScheduleRuntime,
    )
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from . import follows_torch  # noqa: F401 - refuses an older torch
    from .torch_stages import require_stages
except ImportError as error:
    raise ImportError(
        f"torch must be 2.13 to 2.15 to run plans on its runtime, got {torch.__version__}: {error}"
    ) from error

# Methods of torch's runtime that are called or replaced here; torch promises no one that they stay.
_USED = (
    "_prepare_schedule_with_comms",
    "_initialize_stages",
    "_step_microbatches",
    "_compute_loss",
    "_maybe_compute_loss",
    "_maybe_get_loss",
    "_update_losses",
    "_merge_outputs",
)


def to_torch(  # noqa: PLR0913 - what torch's schedules take, by torch's names
    plan: Plan,
    stages: Sequence[_PipelineStageBase],
    n_microbatches: int | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
    output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
    scale_grads: bool = True,
    costs: Costs | None = None,
) -> PlanSchedule:
    """A schedule of torch.distributed.pipelining that runs a plan, in place of one of torch's own.

    Every process of the stages' group calls it with the same plan; process r is device r.

    Args:
        plan: Any with a backward and without replicas, slices and recompute.
        stages: This process's stages, from `PipelineStage` or `build_stage`, in any order.
        n_microbatches: The plan's count, which is the default.
        loss_fn: Called with an output and a target of one microbatch; None runs forwards alone.
        args_chunk_spec: As torch's schedules take it, like the next two.
        kwargs_chunk_spec: See args_chunk_spec.
        output_merge_spec: See args_chunk_spec.
        scale_grads: Whether each loss counts as one of n_microbatches: for losses that are means.
        costs: Those by which sends and receives are ordered; else a backward is twice a forward.

    Raises:
        PlanError: The plan breaks a rule.
        ValueError: Torch's runtime cannot run it, or not with these stages or this group.
        TypeError: A stage is not a `PipelineStage`.
        ImportError: This torch has another runtime.
    """
    _require_runtime()
    check(plan)
    require_sayable(plan, "torch's runtime", advice="")
    if plan.first_trained == plan.num_stages:
        raise ValueError(
            "plan must have backwards for torch's runtime, got one without. Give a plan of a "
            "training schedule"
        )
    require_all_trained(plan)
    require_stages(plan, stages)
    if n_microbatches not in {None, plan.num_microbatches}:
        raise ValueError(
            f"n_microbatches must be {plan.num_microbatches}, as in the plan, got {n_microbatches}"
        )
    ordered = sorted(stages, key=lambda stage: stage.stage_index)
    options = {
        "loss_fn": loss_fn,
        "args_chunk_spec": args_chunk_spec,
        "kwargs_chunk_spec": kwargs_chunk_spec,
        "output_merge_spec": output_merge_spec,
        "scale_grads": scale_grads,
    }
    return PlanSchedule(plan, costs or ORDER_COSTS, ordered, options)


class PlanSchedule(_PipelineScheduleRuntime):
    """A plan as a schedule of torch's: `step` and `eval` are those of `PipelineScheduleMulti`.

    Where torch's own schedules divide all of `.grad` by the number of microbatches at the end of a
    step, here each loss is divided before its backward; so gradients add up over steps. Losses come
    detached, and like outputs in the order of the microbatches in whatever order they are run.

    Made by `to_torch`.

    Args:
        plan: That the stages have been found to fit.
        costs: That order its messages.
        stages: This process's stages, ascending.
        options: Arguments of torch's constructor.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        stages: list[_PipelineStageBase],
        options: dict[str, Any],
    ) -> None:
        super().__init__(stages, plan.num_microbatches, **options)  # type: ignore[no-untyped-call]
        for stage in stages:
            _greet_others_only(stage)
        waits = torch_waits()
        rows = rows_with_transfers(plan, costs, waits=waits)
        self._prepare_schedule_with_comms(
            {rank: list(map(_Action.from_str, row)) for rank, row in enumerate(rows)},
            format="compute_comms",
        )
        self._row = self.pipeline_order_with_comms[self.rank]
        # In evaluation torch would hand on gradients between stages of one process, and find none.
        forwards = rows_with_transfers(plan.forward_only(), costs, waits=waits)
        self._evaluation_row = list(map(_Action.from_str, forwards[self.rank]))
        self._divisor = plan.num_microbatches if options["scale_grads"] else 1
        # Torch would divide what earlier steps have left in .grad too.
        self.scale_grads = False
        last = plan.num_stages - 1
        self._run_order = [
            action.microbatch
            for row in plan.rows
            for action in row
            if action.stage == last and action.kind is Kind.F
        ]
        self._losses: dict[int, Tensor] = {}
        # Shapes of the first stage's first microbatch, and whether the step trained.
        self._shapes: tuple[bool, list[torch.Size]] | None = None
        self._told: dict[str, str] | None = {
            "torch": torch.__version__,
            "the plan": f"{plan.num_microbatches} microbatches of {plan.num_stages} stages on "
            f"{plan.num_devices} devices, {digest_of(map(str, rows))}",
            "scale_grads": str(options["scale_grads"]),
        }

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        if self._has_backward and target_mbs is None and self._stages[-1].is_last:
            raise ValueError(
                "target must be given to step in the process of the last stage, got None. Call "
                "step(target=y) there"
            )
        if self.pp_group_size > 1:
            self._require_alike_microbatches(arg_mbs or [])
        if self._told is not None:
            require_alike(_host_group(self._stages[0].group), self._told)
            self._told = None
        self._losses.clear()
        return super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, *rest, **keywords)

    def _require_alike_microbatches(self, arg_mbs: Sequence[Any]) -> None:
        """Refuses what the other processes' buffers, made in the first step, are not made for."""
        for index, arguments in enumerate(arg_mbs):
            shapes = [one.shape for one in arguments if isinstance(one, Tensor)]
            if self._shapes is None or self._shapes[0] != self._has_backward:
                self._shapes = self._has_backward, shapes
            if shapes != self._shapes[1]:
                raise ValueError(
                    f"inputs of microbatch {index} must have shapes "
                    f"{list(map(tuple, self._shapes[1]))}, as in the first microbatch, got "
                    f"{list(map(tuple, shapes))}. Torch's runtime receives every microbatch into a "
                    "buffer of that size"
                )

    def _initialize_stages(self, *args: Any, **keywords: Any) -> None:
        super()._initialize_stages(*args, **keywords)
        row = self._training_row() if self._has_backward else self._evaluation_row
        self.pipeline_order_with_comms[self.rank] = row

    def _training_row(self) -> list[_Action]:
        """Actions of this process, with a whole backward where nothing before a stage trains.

        Torch's split backward finds the weights' gradients on the way to those of the inputs: where
        no input needs one, it finds none, and says nothing.
        """
        cut_off = {
            stage.stage_index
            for stage in self._stages
            if not stage.is_first and not _needs_input_gradient(stage)
        }
        return [
            _unsplit(action, cut_off)
            for action in self._row
            if action.stage_index not in cut_off
            or action.computation_type is not _ComputationType.BACKWARD_WEIGHT
        ]

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *rest: Any
    ) -> None:
        # Without a target: eval, which then has outputs alone.
        if stage.is_last and self._loss_fn is not None and target_mbs is not None:
            loss = self._compute_loss(  # type: ignore[no-untyped-call]
                output, target_mbs[mb_index], *rest
            )
            self._losses[mb_index] = loss

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        if not (stage.is_last and self._has_backward):
            return None
        loss = self._losses[mb_index]
        # The loss that is kept for the caller must not keep the graph.
        self._losses[mb_index] = loss.detach()
        return loss / self._divisor if self._divisor > 1 else loss

    def _update_losses(self, stages: Any, losses: list[Tensor] | None) -> None:
        if losses is not None and stages[-1].is_last:
            losses[:] = [loss for _, loss in sorted(self._losses.items())]
        self._losses.clear()

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        of_microbatch = dict(zip(self._run_order, output_chunks, strict=True))
        return super()._merge_outputs([of_microbatch[key] for key in sorted(of_microbatch)])


def _require_runtime() -> None:
    missing = [name for name in _USED if not hasattr(_PipelineScheduleRuntime, name)]
    if missing:
        raise ImportError(
            f"torch must be 2.13 to 2.15 to run plans on its runtime, got {torch.__version__}: "
            f"_PipelineScheduleRuntime has no {', '.join(missing)}"
        )


def _host_group(group: ProcessGroup | None) -> ProcessGroup:
    """A group of the same processes for objects on the host."""
    found = cast(ProcessGroup, group or dist.group.WORLD)
    return found if dist.get_backend(found) == "gloo" else control_group(found)


def _greet_others_only(stage: _PipelineStageBase) -> None:
    """Keeps what torch sends to neighbouring stages first from those of this process.

    gloo sends nothing to its own process. torch 2.13 and 2.14 do so for stages made by build_stage;
    torch 2.15 sends nothing beforehand.
    """
    greet = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greet is not None:
        # Set on the stage alone, whose method it shadows.
        stage.__dict__["_get_init_p2p_neighbors_ops"] = lambda: [
            operation for operation in greet() if operation.group_peer != stage.group_rank
        ]


def _needs_input_gradient(stage: _PipelineStageBase) -> bool:
    """Whether anything that the stage receives comes from parameters that train."""
    received = [getattr(info, "tensor_meta", info.buffer) for info in stage.args_recv_info[0]]
    return any(one is not None and one.requires_grad for one in received)


def _unsplit(action: _Action, stages: set[int]) -> _Action:
    """The action with B for I where it is of one of the stages."""
    if action.sub_actions:
        parts = tuple(_unsplit(part, stages) for part in action.sub_actions)
        return action._replace(sub_actions=parts)
    is_input = action.computation_type is _ComputationType.BACKWARD_INPUT
    if not is_input or action.stage_index not in stages:
        return action
    return action._replace(computation_type=_ComputationType.FULL_BACKWARD)
