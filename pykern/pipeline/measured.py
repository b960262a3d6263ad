"""What ran when in the steps of a pipeline, what that cost, and what the simulator makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import fmean

from ..parallel.data.data import DataParallel
from ..plan import Costs, Kind, Plan, Span, Timeline, simulate, with_reductions
from ..runtime.driver import Program
from ..runtime.executor import Executor
from ..runtime.stage.stage import Stage
from .model_face import Adopted


class Measured(Adopted):
    """The half of a pipeline that says how steps are taken, and tells about them."""

    plan: Plan
    _executor: Executor
    _train_program: Program
    _predict_program: Program
    _data: DataParallel | None
    _last_program: Program | None = None

    def timeline(self, ago: int = 0) -> Timeline:
        """What ran when in the last step or forward; on GPUs, in the last that was traced.

        Args:
            ago: how many steps, or forwards, before the last one. CPU workers keep the last eight,
                GPUs one.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
            IndexError: that step is not kept.
        """
        if self._last_program is None:
            raise RuntimeError("there is no timeline yet: call step or the pipeline itself first")
        return self._executor.driver.timeline(self._last_program, ago)

    def copies(self) -> Timeline:
        """When each copy between GPUs ran in the last step that was traced.

        Returns:
            A row for each copy stream, in the time of `timeline()`; no rows on CPU workers, where
            nothing is copied.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
        """
        if self._last_program is None:
            raise RuntimeError("there are no copies yet: call step or the pipeline itself first")
        return self._executor.copies(self._last_program)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it, steps on GPUs are timed. On CPU workers all are.

        Timing a step waits for everything before it, and its events take time of their own.
        """
        self._executor.traced = True
        try:
            yield
        finally:
            self._executor.traced = False

    def reductions(self) -> Timeline:
        """When gradients were on their way to other processes in the last step.

        Returns:
            A row for each device with a span for each of its stages, in the time of `timeline()`;
            no rows without a `process_group`, after a step within `no_sync`, or on GPUs.

        Raises:
            RuntimeError: nothing has run yet.
        """
        return Timeline([]) if self._data is None else self._data.reductions(self.timeline())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, steps do not add up gradients over processes.

        The first step outside does, with all that was collected since: accumulation for the price
        of one sum. Losses are those of all processes as ever. Without a `process_group`, nothing
        changes.
        """
        with nullcontext() if self._data is None else self._data.no_sync():
            yield

    def _can_stream_gradients(self) -> bool:
        """Whether gradients are final when a stage's REDUCE runs, and Python with it."""
        return self._data is None and not self._executor.driver.captures

    def _at_reduce(self, call: Callable[[Stage], None]) -> None:
        """From now on, calls it for each stage that has collected its last gradient of a step."""
        self.plan = with_reductions(self.plan, over_peers=True)
        self._train_program = self._executor.driver.program(self.plan)
        for stage in self._executor.stages:
            stage.reductions.append(partial(call, stage))

    def costs(self) -> Costs:
        """What the last step cost: the mean times of each stage's actions by kind.

        On GPUs also of the copies between each two stages. Plans can be compared, and searched
        (`pykern.search.auto`), with them.
        """
        return _mean_costs(self.timeline(), self.copies(), self.plan.num_stages)

    def prediction(self) -> Timeline:
        """The simulator's timeline for the last step, from its `costs`."""
        forward_only = all(span.action.kind is Kind.F for span in _spans(self.timeline()))
        return simulate(self.plan.forward_only() if forward_only else self.plan, self.costs())


def _mean_costs(timeline: Timeline, copies: Timeline, num_stages: int) -> Costs:
    """The mean time of each stage by kind, and of copies; 0 where there are none."""
    kinds = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
    times: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(num_stages)] for kind in kinds}
    for span in _spans(timeline):
        if span.action.kind in times:
            of_stage = times[span.action.kind][span.action.stage]
            of_stage.append(span.end_ns - span.start_ns)
    crossings: list[list[float]] = [[] for _ in range(num_stages)]
    for span in _spans(copies):
        # The boundary behind a stage, which a gradient crosses from the other side.
        back = span.action.kind == Kind.COPY_B
        crossings[span.action.stage - back].append(span.end_ns - span.start_ns)
    forward, recompute, backward, inputs, weights = (_means(times[kind]) for kind in kinds)
    # As many bytes as nanoseconds, because a cost has one bandwidth for all boundaries.
    return Costs(
        forward,
        backward,
        recompute_ns=recompute,
        input_ns=inputs,
        weight_ns=weights,
        message_bytes=_means(crossings),
        bandwidth=1.0,
    )


def _spans(timeline: Timeline) -> Iterator[Span]:
    return (span for row in timeline.rows for span in row)


def _means(times: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(of_stage) if of_stage else 0.0 for of_stage in times]
