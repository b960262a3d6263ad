"""The schedule classes under torch's names, and what makes a plan of them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from ... import schedules
from ...one_of import require_one_of
from ...plan import load_plan
from ...plan.files import load_torch_csv, save_torch_csv
from ...plan.files.torch_csv import from_torch_csv
from ...runtime.loss import Loss
from .chunks import ChunkSpecs
from .schedule import PipelineSchedule
from .stage import PipelineStage

CsvFormat: TypeAlias = Literal["compute_only", "compute_comms"]


class PipelineScheduleSingle(PipelineSchedule):
    """Schedules of one stage per device.

    Args:
        stage: this rank's; all stages, in a list, where there is one rank.
        n_microbatches: how many parts each batch is cut into, at least 1.
        loss_fn: called with (output, target) of each microbatch; None for forward only.
        args_chunk_spec: a `TensorChunkSpec` for each positional argument; dimension 0 by default.
        kwargs_chunk_spec: the same by the names of keyword arguments.
        output_merge_spec: how outputs are joined; along dimension 0 by default.
        scale_grads: whether gradients are divided by the number of microbatches, which makes them
            those of the mean loss.

    Raises:
        TypeError: a stage is not a `PipelineStage`, or a count is not an int.
        ValueError: stages are missing, or do not fit the schedule.
    """

    _chunks: ClassVar[int | None] = 1

    def __init__(  # noqa: PLR0913, PLR0917 - torch's arguments, in torch's order
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        stages = stage if isinstance(stage, Sequence) else [stage]
        specs = ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, specs, scale_grads)


class PipelineScheduleMulti(PipelineSchedule):
    """Schedules of several stages per device; itself one of a plan that is read from a file.

    Arguments that are not named here are those of `PipelineScheduleSingle`.

    Args:
        stages: this rank's; all stages where there is one rank.
        use_full_backward: not used, as in torch.
        backward_requires_autograd: must be True: every backward is autograd's.

    Raises:
        TypeError, ValueError: as `PipelineScheduleSingle`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's arguments, in torch's order
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        del use_full_backward
        if not backward_requires_autograd:
            raise ValueError(
                "backward_requires_autograd must be True, got False. The backward is always "
                "autograd's"
            )
        specs = ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, specs, scale_grads)

    def _load_csv(
        self, filename: str | os.PathLike[str], format: CsvFormat = "compute_only"
    ) -> None:
        """Takes the plan in torch's CSV, or in a .json of `pykern.plan.save_plan`.

        Args:
            filename: ends in .json, or in anything else for a CSV.
            format: either of torch's; transfers must pair up and are then left out.

        Raises:
            ValueError: the format is unknown, or the file holds no plan for these stages.
            OSError: the file cannot be read.
        """
        _require_format(format)
        is_json = Path(filename).suffix.lower() == ".json"
        self._use(load_plan(filename) if is_json else load_torch_csv(filename))

    def _dump_csv(
        self, filename: str | os.PathLike[str], format: CsvFormat = "compute_comms"
    ) -> None:
        """Writes the plan as CSV, which torch's `_PipelineScheduleRuntime._load_csv` reads.

        Args:
            filename: of any ending; an existing file is replaced at once or not at all.
            format: "compute_comms" with sends, receives and REDUCE_GRAD, "compute_only" without.

        Raises:
            RuntimeError: there is no plan yet.
            ValueError: the format is unknown, or torch cannot be told of the plan.
            OSError: the file cannot be written.
        """
        _require_format(format)
        save_torch_csv(self._known_plan(), filename, transfers=format == "compute_comms")

    def _prepare_schedule_with_comms(
        self, actions: Mapping[int, Sequence[object]], format: CsvFormat = "compute_only"
    ) -> None:
        """Takes a plan that is in memory.

        Args:
            actions: by rank, torch's actions or pykern's; None where a rank waits.
            format: either of torch's, as for `_load_csv`.

        Raises:
            ValueError: the format is unknown, or the actions are not a plan for these stages.
        """
        _require_format(format)
        text = io.StringIO(newline="")
        csv.writer(text).writerows(actions[rank] for rank in sorted(actions))
        self._use(from_torch_csv(text.getvalue()))


def _require_format(format: CsvFormat) -> None:
    require_one_of("format", format, get_args(CsvFormat))


class _Looped(PipelineScheduleMulti):
    """Schedules whose constructors take chunk specs and, unused, `defer_pp_recv` and more."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's arguments, in torch's order
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ) -> None:
        # Nothing is sharded, or received: there is one memory, or copies that the sender starts.
        del defer_pp_recv, max_active_stages, unshard_lookahead
        del defer_reduce_grad_wait, max_outstanding_sends
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
        )


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards: `pykern.schedules.gpipe`."""

    _order = staticmethod(schedules.gpipe)


class Schedule1F1B(PipelineScheduleSingle):
    """F and B in turn, with any number of microbatches: `pykern.schedules.one_f_one_b`."""

    _order = staticmethod(schedules.one_f_one_b)


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """All microbatches through a stage before the next: `pykern.schedules.breadth_first`.

    Arguments as for `PipelineScheduleMulti`; from `defer_pp_recv` on they are not used.
    """

    _order = staticmethod(schedules.breadth_first)

    def __init__(  # noqa: PLR0913, PLR0917 - torch's arguments, in torch's order
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ) -> None:
        del defer_pp_recv, max_active_stages, unshard_lookahead
        del defer_reduce_grad_wait, max_outstanding_sends
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
        )


class ScheduleInterleaved1F1B(_Looped):
    """1F1B over several stages of each device: `pykern.schedules.interleaved`.

    Any number of microbatches will do.
    """

    _order = staticmethod(schedules.interleaved)


class ScheduleInterleavedZeroBubble(_Looped):
    """The same with split backward: `pykern.schedules.interleaved_zb`."""

    _order = staticmethod(schedules.interleaved_zb)


class ScheduleZBVZeroBubble(_Looped):
    """Stages down the devices and back, with split backward: `pykern.schedules.zb_v`."""

    _order = staticmethod(schedules.zb_v)
    _chunks = 2


class ScheduleDualPipeV(_Looped):
    """Forwards beside backwards, on the same placement: `pykern.schedules.dualpipe_v`."""

    _order = staticmethod(schedules.dualpipe_v)
    _chunks = 2


# torch's name for what runs a plan from a file.
_PipelineScheduleRuntime = PipelineScheduleMulti

_BY_NAME: dict[str, type[PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """The class of a name such as "1F1B", in any case.

    Raises:
        ValueError: torch has no schedule of that name.
    """
    by_lower_case = {name.lower(): found for name, found in _BY_NAME.items()}
    if schedule_name.lower() not in by_lower_case:
        require_one_of("schedule_name", schedule_name, _BY_NAME)
    return by_lower_case[schedule_name.lower()]
