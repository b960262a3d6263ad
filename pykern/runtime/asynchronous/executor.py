"""Runs a plan that updates weights part by part: microbatches stay in flight between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ... import _C
from ...plan import Action, Kind
from ...plan.parts import Parts
from ...torch_private import version_of
from ..batch import Batch, values_of
from ..cpu.workers import Workers
from ..driver import Program
from ..executor import Executor
from ..loss import Losses
from ..stage.settings import Settings
from ..stage.stage import Ends, Run, Stage
from .optimizers import StageOptimizer, refuse_foreign, stepped
from .refusals import refuse_shared
from .seeds import BatchSeed, SlotSeeds
from .versions import Versions

# The kinds of action that such a plan may hold.
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)


class AsyncExecutor(Executor):
    """The stages of a model with their weight versions, and the driver that runs and updates them.

    A step takes one batch and ends where the next batch could enter. A microbatch has a slot from
    its entry until its update. A failure in a step drops everything in flight.

    Args:
        stages: of one replica, all on the CPU.
        parts: of the plan.
        driver: the workers that run the actions.
        mean: whether losses are averaged over rows (True) or added (False).

    Attributes:
        versions: of each stage.
        group: number of microbatches of one update.
    """

    def __init__(
        self, stages: Sequence[Stage], parts: Parts, driver: Workers, *, mean: bool = True
    ) -> None:
        super().__init__(stages, parts.plan, [stage.device for stage in stages], driver)
        self.versions = [Versions(stage, parts.group) for stage in stages]
        self.group = parts.group
        self._mean = mean
        self._parts = parts
        self._size = parts.plan.num_microbatches
        self._windows = [driver.part(part) for part in parts.windows]
        self._rests = [driver.part(part) for part in parts.rests]
        self._updaters: Sequence[StageOptimizer] = ()
        # By stage, the settings in the last step. A stage whose layers change has a new object.
        self._checked: list[Settings | None] = []
        self._forget()

    def update_by(self, optimizer: Optimizer) -> None:
        """Sets the optimizer that changes the weights."""
        self._optimizer = optimizer
        layers = [nn.ModuleList(stage.originals) for stage in self._stages]
        self._updaters = [StageOptimizer(optimizer, each.parameters()) for each in layers]
        self._known = {id(p) for each in layers for p in each.parameters()}

    @property
    def in_flight(self) -> bool:
        """Whether microbatches are in flight: True from the first step until `flush`."""
        return self._num_batches > 0

    def require_flushed(self, what: str) -> None:
        """Raises RuntimeError for `what` if microbatches are in flight."""
        if self.in_flight:
            raise RuntimeError(f"{what} with microbatches in flight. Call flush() first")

    def step(self, batch: Batch) -> tuple[Tensor, Program]:
        """Takes a batch, and runs until the next batch could enter.

        Args:
            batch: its `finish` is a `Losses`, so that each update uses the mean of its group.

        Returns:
            The loss of the rows whose loss was computed, and the program that has run.

        Raises:
            RuntimeError: as for `run`, or layers have been changed under microbatches in flight.
            BaseException: as for `run`. All microbatches in flight are dropped.
        """
        super()._refuse_flow()
        with self.driver.claim():
            # A forward may be recorded here. An exception leaves all state unchanged.
            calls = batch.calls
            self._require_untouched()
            values = values_of(batch.inputs, batch.target)
            for stage in self._stages:
                stage.values = values
            self._go_on()
            with _C.Within(self._losses.clear, self._leave):
                seed = BatchSeed()
                number = self._num_batches
                may_draw = any(stage.draws.possible for stage in self._stages)
                if may_draw:
                    seed.take()
                for index, call in enumerate(calls):
                    self._enter(number * self._size + index, call, (batch, seed, index))
                self._num_batches += 1
                position, shift = self._parts.alike(number)
                program = self._windows[position]
                self._run_part(program, shift)
                if may_draw and not any(stage.draws.possible for stage in self._stages):
                    seed.give_back()
                loss = self._loss()
                assert loss is not None
                return loss, program

    def flush(self) -> tuple[Tensor | None, Program | None]:
        """Runs the remaining actions, with their updates.

        Returns:
            As `step`; None in place of a loss or a program if no work was left.

        Raises:
            RuntimeError, BaseException: as for `step`.
        """
        super()._refuse_flow()
        if not self.in_flight:
            return None, None
        with self.driver.claim():
            self._require_untouched()
            self._go_on()
            with _C.Undo(self._drop), _C.Within(self._losses.clear, self._leave):
                position, shift = self._parts.alike(self._num_batches - 1)
                program = self._rests[position]
                self._run_part(program, shift)
                return self._loss(), program

    def close(self) -> None:
        """Ends the workers, and drops all microbatches in flight."""
        super().close()
        self._drop()

    def _refuse_flow(self) -> None:
        super()._refuse_flow()
        self.require_flushed("the pipeline cannot run a forward alone")

    def _go_on(self) -> None:
        """Has the stages notice changes of their layers and of the optimizer's settings."""
        seeds, keep = self._seeds, self._finish
        for stage in self._stages:
            if self._num_batches == 0:
                stage.begin(self._parts.num_slots, seeds, keep)
            else:
                stage.go_on(seeds, keep)
            stage.name(self._keywords)
        if self._num_batches == 0:
            for versions in self.versions:
                versions.begin()
        settings = [stage.settings for stage in self._stages]
        if len(settings) != len(self._checked) or not all(map(is_, settings, self._checked)):
            refuse_shared(settings)
            self._checked = settings
        for updater in self._updaters:
            updater.begin()

    def _enter(self, number: int, call: Any, cell: tuple[Batch, BatchSeed, int]) -> None:
        """Takes a microbatch. `number` counts microbatches since the pipeline was last empty."""
        slot = number % self._parts.num_slots
        batch, seed, index = cell
        self._seeds.put(slot, seed, index)
        if call is not None:
            self._cells[slot] = batch, index
            self._keywords[slot] = call[1]
        self._stages[0].take(slot, None if call is None else call[0])

    def _run_part(self, program: Program, shift: int) -> None:
        nothing = Batch(((), {}), None, (), self._finish)
        failures = self.driver.run(program, self._calls(shift), nothing, traced=False)
        self._failures.raise_first(failures, partial(self._located, shift))
        stepped(self._optimizer)
        self._note()

    def _leave(self, error: BaseException | None) -> None:
        """Ends the part of the plan that ran. May be called twice."""
        for versions in self.versions:
            versions.take_back()
            versions.stage.layers = versions.stage.originals
        if error is not None:
            self._drop()
            self._failures.note(
                error,
                "microbatches in flight are dropped, and stages may have made different numbers of "
                "updates. Resume from the last checkpoint",
            )

    def _calls(self, shift: int) -> dict[Kind, list[Run]]:
        """The call of each action, which gets its microbatch of the plan and uses its slot."""
        num_slots = self._parts.num_slots

        def on_slot(call: Run) -> Run:
            return lambda microbatch: call((microbatch + shift) % num_slots)

        def through(kind: Kind, way: Callable[[Versions], Callable[[Run, int], None]]) -> list[Run]:
            pairs = zip(self.versions, self._callbacks[kind], strict=True)
            return [on_slot(partial(way(versions), call)) for versions, call in pairs]

        updates = zip(self.versions, self._updaters, strict=True)
        return {
            Kind.F: through(Kind.F, lambda versions: versions.forward),
            Kind.B: through(Kind.B, lambda versions: versions.backward),
            # The autograd graph holds the weights that I needs.
            Kind.I: [on_slot(call) for call in self._callbacks[Kind.I]],
            Kind.W: through(Kind.W, lambda versions: versions.backward),
            Kind.U: [on_slot(partial(of.update, updater.step)) for of, updater in updates],
        }

    def _finish(self, slot: int, output: Any, once: bool) -> Ends:
        """Computes the loss of a microbatch, and releases its batch."""
        cell = self._cells[slot]
        assert cell is not None
        batch, index = cell
        self._cells[slot] = None
        self._keywords[slot] = {}
        assert isinstance(batch.finish, Losses)
        ends = batch.finish(index, output, once)
        self._losses.append((batch.finish.of(index), batch.rows[index]))
        return ends

    def _loss(self) -> Tensor | None:
        """The loss of the rows whose losses the last part has computed."""
        if not self._losses:
            return None
        num_rows = sum(rows for _, rows in self._losses)
        shares = [rows / num_rows if self._mean else 1.0 for _, rows in self._losses]
        pairs = zip(self._losses, shares, strict=True)
        first, *others = (loss * share for (loss, _), share in pairs)
        return sum(others, first)

    def _located(self, shift: int, action: Action) -> tuple[Action, str]:
        """The action numbered within its batch, and the batch."""
        number, index = divmod(action.microbatch + shift, self._size)
        ago = self._num_batches - 1 - number
        where = f"the batch of {ago} steps before" if ago > 0 else ""
        return Action(action.kind, action.stage, index), where

    def _note(self) -> None:
        """Records modes and parameters, which must not change with microbatches in flight."""
        modules = [
            m for stage in self._stages for layer in stage.originals for m in layer.modules()
        ]
        self._modes = [(module, module.training) for module in modules]
        self._written = [
            (parameter, version_of(parameter))
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def _require_untouched(self) -> None:
        refuse_foreign(self._optimizer, self._known)
        if any(module.training != mode for module, mode in self._modes):
            raise RuntimeError(
                "train() or eval() was called with microbatches in flight, which would run in "
                "another mode than their batch. Set the mode back, and call flush() first"
            )
        if any(version_of(parameter) != version for parameter, version in self._written):
            self._drop()
            raise RuntimeError(
                "a parameter was written with microbatches in flight, whose backwards need the "
                "former values. Call flush() before. The microbatches are dropped: go on from the "
                "last checkpoint"
            )

    def _drop(self) -> None:
        """Lets go of everything in flight."""
        for stage in self._stages:
            stage.end()
        for versions in self.versions:
            versions.end()
        self._forget()

    def _forget(self) -> None:
        num_slots = self._parts.num_slots
        # The number of batches since the pipeline was last empty.
        self._num_batches = 0
        self._seeds = SlotSeeds(num_slots)
        self._cells: list[tuple[Batch, int] | None] = [None] * num_slots
        self._keywords: list[dict[str, Any]] = [{}] * num_slots
        # The losses computed in this part, each with its number of rows.
        self._losses: list[tuple[Tensor, int]] = []
        self._modes, self._written = [], []
