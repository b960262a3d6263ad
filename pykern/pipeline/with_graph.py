"""Forwards whose backwards run when autograd asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from .. import _C
from ..modes import Autocast, as_before, autocast, set_autocast
from ..once import once
from ..plan import Kind, Plan, Span, Timeline
from ..runtime.aliases import Aliases
from ..runtime.autograd.cut import cut
from ..runtime.batch import Batch, Enter
from ..runtime.driver import Driver, Program
from ..runtime.executor import Executor
from ..runtime.halfway import Halfway
from ..runtime.read_again import ReadAgain
from ..runtime.recompute.watch import without_saved_tensors_hooks
from ..runtime.through import ForwardPass, GraphEnds, OutputGradients
from ..tensors.trees import Call, all_tensors
from ..torch_private import set_grad, top_hooks, transform
from ..trace import Segment
from .choose_levels import Levels


class WithGraph:
    """Runs the forwards of a pipeline as one operation of autograd.

    Args:
        executor: the pipeline's executor.
        plan: the plan of its training steps.
        levels: the recompute levels: what each forward keeps for its backward.
        refused: the reason why gradients cannot come back; None if they can.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        levels: Levels,
        refused: str | None,
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._levels = levels
        if refused is None and not (plan.has(Kind.B) or plan.has(Kind.I)):
            refused = (
                "gradients cannot come back through this output: the plan has forward actions "
                "only. Make the Pipeline with a plan for training"
            )
        self.refused = refused

    @once
    def _halves(self) -> tuple[Program, Program]:
        return self._executor.driver.halves(self._plan)

    @property
    def _is_timed(self) -> bool:
        """Whether the present run leaves a timeline; on CPU workers, in one memory, every run."""
        return self._executor.traced or self._executor.in_one_memory

    def run(
        self,
        call: Call,
        rows: Sequence[int],
        weights: Sequence[float],
        enter: Enter,
        model: nn.Module,
    ) -> tuple[Any, Ran]:
        """The output for the whole batch, in the graph of the caller, and the programs that ran.

        Args:
            call: arguments of the model, for all rows.
            rows: the number of rows of each microbatch.
            weights: the weights of the microbatches, for outputs without dimensions.
            enter: as of a `Batch`.
            model: the model that the parameters belong to.
        """
        ran = Ran(self._halves[0], is_timed=self._is_timed)
        given = call
        call, _ = self._executor.replicas.place(call, None)
        ends, begin = GraphEnds(weights), _Begin(enter)
        has_graph = any(tensor.requires_grad for tensor in all_tensors(call))
        enter = begin if has_graph else enter
        batch = Batch(call, None, rows, ends, self._levels, enter, given)
        # A call that is refused must not touch the model, which a step of another thread may run.
        with self._executor.alone():
            # The calls come first, as a recorded forward has to find the model's own parameters.
            _ = batch.calls
            aliases = Aliases(self._modules(model))
            read_again = ReadAgain(self._modules(model) if self._levels else (), all_tensors(call))
            with aliases.in_place(), _outside_checkpoints():
                aliases.take_place()
                left = self._executor.run_claimed(ran.forwards, batch, self._executor.leave)
        aliases.end_forwards()
        read_again.end_forwards()
        kept = _Kept(weights, left, aliases, read_again, begin.leaves, autocast(), ran)
        made = ForwardPass(ends, partial(self._run_back, kept))
        outputs = made.outputs((*begin.outside, *aliases.originals))
        return ends.merged(outputs), ran

    def _modules(self, model: nn.Module) -> Iterator[nn.Module]:
        # Segments of a recorded model hold its parameters too, but are not modules of the model.
        layers = [layer for stage in self._executor.stages for layer in stage.originals]
        yield from model.modules()
        for layer in layers:
            # A compiled stage is one layer that has the segments as children.
            inside = (layer, *layer.children())
            yield from (module for module in inside if isinstance(module, Segment))

    def _run_back(
        self, kept: _Kept, gradients: OutputGradients, begin: Callable[[], None]
    ) -> Sequence[Tensor | None]:
        """The gradients of the inputs of the operation; `kept` is used up by a call of `begin`."""
        aliases = kept.aliases
        batch = Batch(((), {}), None, (), GraphEnds(kept.weights, gradients), self._levels)
        with _C.HoldForks(), as_before(), self._executor.alone(), aliases.in_place():
            kept.require_unchanged()
            begin()
            # The settings are those of the forward, because R repeats the forward.
            set_grad(True)
            set_autocast(kept.autocast)
            aliases.take_place()
            self._executor.resume(self._halves[1], batch, kept.left)
        if kept.ran.is_timed and self._is_timed:
            kept.ran.backwards = self._halves[1]
        return [*(leaf.grad for leaf in kept.leaves), *aliases.take_gradients()]


@dataclass
class Ran:
    """The programs that one call has run.

    Attributes:
        forwards: the program of the forwards, which has run.
        is_timed: whether the forwards left a timeline.
        backwards: the program of the backwards, if it has run and both are timed.
    """

    forwards: Program
    is_timed: bool
    backwards: Program | None = None

    def timeline(self, driver: Driver, ago: int) -> Timeline:
        """The timeline of both programs, without the caller's time between them."""
        first = driver.timeline(self.forwards, ago)
        if self.backwards is None:
            return first
        return _behind(first, driver.timeline(self.backwards, ago), first.makespan_ns)

    def copies(self, executor: Executor) -> Timeline:
        """The copies of both programs, in the time of `timeline`."""
        first = executor.copies(self.forwards)
        if self.backwards is None or not first.rows:
            return first
        start_ns = executor.driver.timeline(self.forwards, 0).makespan_ns
        return _behind(first, executor.copies(self.backwards), start_ns)


def _behind(first: Timeline, second: Timeline, start_ns: float) -> Timeline:
    """The first timeline, followed by the second from `start_ns` on."""
    rows = [
        [*row, *(Span(s.action, start_ns + s.start_ns, start_ns + s.end_ns) for s in later)]
        for row, later in zip(first.rows, second.rows, strict=True)
    ]
    return Timeline(rows)


@dataclass(frozen=True)
class _Kept:
    """Everything that a forward keeps for its backward.

    Attributes:
        weights: the weights of the microbatches, for outputs without dimensions.
        left: the state that the stages have left for their backwards.
        aliases: the aliases of the parameters.
        read_again: what a recompute reads again.
        leaves: the leaves behind the cut in front of the first stage.
        autocast: the autocast settings of the forward.
        ran: the programs that have run.
    """

    weights: Sequence[float]
    left: Halfway
    aliases: Aliases
    read_again: ReadAgain
    leaves: Sequence[Tensor]
    autocast: Autocast
    ran: Ran

    def require_unchanged(self) -> None:
        """Raises RuntimeError if a recompute would read something else than its forward."""
        if not self.left.recomputes:
            return
        if self.aliases.written:
            raise RuntimeError(
                "parameters must stay as they are from forward to backward, got changed ones, "
                "with which recompute would run the forward again. Call optimizer.step() after "
                "the backward"
            )
        self.read_again.require_unchanged()


class _Begin:
    """Cuts the graph in front of the first stage.

    Attributes:
        outside: the tensors before the cut that require grad, in the graph of the caller.
        leaves: for each of these tensors, the leaf behind the cut.
    """

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self.outside: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def __call__(self, calls: Sequence[Call | None]) -> Sequence[Call | None]:
        found = [None if call is None else cut(call) for call in calls]
        for one in found:
            if one is not None:
                self.outside += one.outputs
                self.leaves += one.leaves
        return self._enter([None if one is None else one.value for one in found])


def end_of_backward(call: Call, model: nn.Module) -> Tensor | None:
    """A tensor that a backward would lead to; None if nothing trains."""
    tensors = chain(model.parameters(), all_tensors(call))
    return next((tensor for tensor in tensors if tensor.requires_grad), None)


def _outside_checkpoints() -> AbstractContextManager[object]:
    """Keeps the caller's `torch.utils.checkpoint` from calling the pipeline within its backward."""
    hooks = top_hooks()
    is_checkpoint = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    return without_saved_tensors_hooks() if is_checkpoint else nullcontext()


def refuse_transforms(call: Call) -> None:
    """Raises RuntimeError if torch needs more of a forward than its result and one backward."""
    found = transform(all_tensors(call))
    if found is not None:
        raise RuntimeError(
            "a pipeline must be called outside of torch.func, torch.export, torch.jit.trace and "
            f"forward-mode differentiation, got a call within {found}, which its workers do not "
            "see. Use the model that the pipeline was made of there, whose parameters it has"
        )
