"""Measurements of a pipeline's steps: timelines, costs, and the simulator's prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from ..attributes import replaced
from ..parallel.data.data import DataParallel
from ..plan import Costs, Kind, Plan, Timeline, simulate, with_reductions
from ..plan.halves import forwards_first
from ..profiling.mean_costs import mean_costs
from ..runtime.driver import Program
from ..runtime.executor import Executor
from ..runtime.stage.stage import Stage
from .model_face import Adopted
from .with_graph import Ran


class Measured(Adopted):
    """The half of a pipeline that sets how steps run, and measures them."""

    plan: Plan
    _executor: Executor
    _train_program: Program
    _predict_program: Program
    _data: DataParallel | None
    _last_program: Program | Ran | None = None

    def _has_run(self, program: Program | Ran) -> None:
        # A module's own way first looks for parameters and modules of this name.
        object.__setattr__(self, "_last_program", program)

    def timeline(self, ago: int = 0) -> Timeline:
        """The timeline of the last step or forward; on GPUs, of the last one that was traced.

        After a backward through the output, the timeline has forward and backward, without the time
        between them.

        Args:
            ago: how many steps, or forwards, before the last one. CPU workers keep the last eight,
                GPUs one.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
            IndexError: that step is not kept.
        """
        if ago < 0:
            raise IndexError(f"ago must be at least 0, got {ago}. Steps count back from the last")
        if self._last_program is None:
            raise RuntimeError("there is no timeline yet. Call step or the pipeline itself first")
        driver = self._executor.driver
        if isinstance(self._last_program, Ran):
            return self._last_program.timeline(driver, ago)
        return driver.timeline(self._last_program, ago)

    def copies(self) -> Timeline:
        """The timeline of the copies between GPUs in the last step that was traced.

        Returns:
            A row for each copy stream, in the time of `timeline()`; no rows on CPU workers, which
            copy nothing.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
        """
        if self._last_program is None:
            raise RuntimeError("there are no copies yet. Call step or the pipeline itself first")
        last = self._last_program
        return last.copies(self._executor) if isinstance(last, Ran) else self._executor.copies(last)

    def tracing(self) -> AbstractContextManager[None]:
        """Times steps, calls and their backwards on GPUs; on CPU workers all are always timed.

        Timing a step waits for everything before it, and its events take time of their own.
        """
        return replaced(self._executor, "traced", True)

    def reductions(self) -> Timeline:
        """The timeline of the all-reduces of gradients over processes in the last step.

        Returns:
            A row for each device with a span for each of its stages, in the time of `timeline()`;
            no rows without a `process_group`, after a step within `no_sync`, or on GPUs.

        Raises:
            RuntimeError: nothing has run yet.
        """
        return Timeline([]) if self._data is None else self._data.reductions(self.timeline())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, steps do not all-reduce gradients over processes.

        The first step outside of it sums all gradients collected since: gradient accumulation for
        the price of one all-reduce. Losses are those of all processes as usual. Without a
        `process_group`, nothing changes.
        """
        with nullcontext() if self._data is None else self._data.no_sync():
            yield

    @property
    def has_own_gradients(self) -> bool:
        """Whether each process has gradients of its own, which a step in `no_sync` has left."""
        return self._data is not None and self._data.has_own_gradients

    def _can_stream_gradients(self) -> bool:
        """Whether a stage's gradients are final when its REDUCE runs, and REDUCE runs Python."""
        return self._data is None and not self._executor.driver.captures

    def _at_reduce(self, call: Callable[[Stage], None]) -> None:
        """Makes steps call the function for each stage after the stage's last gradient."""
        self.plan = with_reductions(self.plan, over_peers=True)
        self._train_program = self._executor.driver.program(self.plan)
        for stage in self._executor.stages:
            stage.reductions.append(partial(call, stage))

    def costs(self) -> Costs:
        """The costs of the last step: the mean times of each stage's actions by kind.

        On GPUs the costs include the copies between each two stages. They serve to compare plans,
        and to search for plans (`pykern.search.auto`).

        Returns:
            Lists with a value for each stage. A kind that did not run has NaN, since its
            time is not known, and a plan that needs it is refused. After a step with whole
            backwards, I and W are unknown. After a step with split backwards (`zb_h1`), F, I and W
            are known, and the time of B is that of I and W together.
        """
        return mean_costs(self.timeline(), self.copies(), self.plan.num_stages)

    def prediction(self) -> Timeline:
        """The simulator's timeline for the last step, from its `costs`."""
        if self.timeline().kinds == [Kind.F]:
            plan = self.plan.forward_only()
        else:
            is_halved = isinstance(self._last_program, Ran)
            plan = forwards_first(self.plan) if is_halved else self.plan
        return simulate(plan, self.costs())
