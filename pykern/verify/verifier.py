"""Runs the steps of a pipeline, some of them beside the plain model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .. import _C
from ..plan import Plan
from ..runtime.batch import Batch, Outputs
from ..runtime.driver import Program
from ..runtime.features.feature import Feature, Made
from ..runtime.loss import Losses
from ..runtime.stage.stage import Stage
from ..trace.kept_state import KeptState
from .boundaries import Boundaries, RunTensors, first_difference
from .compare import Difference, compare_named, compare_trees
from .deferred import BOUNDS as DEFERRED
from .errors import Divergence, VerifyError
from .gradients import Gradients
from .options import Verify
from .plain import LayerByLayer
from .reference import Reference
from .subject import StepResult, Subject, loss_of


class Verifier(Feature):
    """Takes the place of an executor.

    The plain model runs before the step, and its state is then restored, so that verification does
    not change the step. If the results differ, both runs are repeated and the tensors at each stage
    boundary are compared. Then the state after the step is restored.

    Args:
        verify: the steps to verify, and the tolerances.
        subject: makes the plain model for the comparison, from the stages and the plan.
    """

    def __init__(self, verify: Verify, subject: Callable[[Sequence[Stage], Plan], Subject]) -> None:
        self._verify = verify
        self._make_subject = subject
        self._boundaries = Boundaries()
        # The number of steps so far, and of forwards.
        self._counts = {True: 0, False: 0}

    def attach(self, made: Made) -> None:
        """Takes the place of the executor."""
        self._executor = made.executor
        self._subject = self._make_subject(made.executor.stages, made.plan)
        if not made.executor.driver.captures:
            made.executor.watch(self._boundaries.around)
        made.runner = self

    def run(self, program: Program, batch: Batch, result: Any) -> Any:
        """Runs a step as `Executor.run` does, and verifies it if it is due.

        Raises:
            VerifyError: the step differs from the plain model.
            RuntimeError, BaseException: as for `Executor.run`.
        """
        return self._checked(batch, partial(self._executor.run, program, batch, result))

    def predict(self, program: Program, batch: Batch, outputs: Outputs) -> Any:
        """Runs a forward as `Executor.predict` does, and verifies it if it is due.

        Raises:
            VerifyError: the outputs differ from the plain model's.
            RuntimeError, BaseException: as for `Executor.predict`.
        """
        call = partial(self._executor.predict, program, batch, outputs)
        with torch.no_grad():
            return self._checked(batch, call)

    def _checked(self, batch: Batch, call: Callable[[], Any]) -> Any:
        trains = isinstance(batch.finish, Losses)
        number = self._counts[trains]
        self._counts[trains] += 1
        if not self._verify.wants(number):
            return call()
        with self._executor.alone():
            self._subject.refuse_hooks(loss_of(batch))
            before = self._subject.state(batch)
            plain = self._plain(batch, before)
        value = call()
        name = f"{'step' if trains else 'forward'} {number + 1}"
        if isinstance(plain, Exception):
            raise _raised(name, plain) from plain
        ours = self._subject.result(value, loss_of(batch))
        found = list(self._differences(ours, plain))
        if found:
            origin = self._origin(batch, before, call)
            raise self._error(name, found, len(ours.gradients), origin)
        return value

    def _plain(self, batch: Batch, before: KeptState) -> StepResult | Exception:
        # The step most likely raises the same error, with a note of where.
        try:
            return Reference(self._subject, batch).run(before)
        except Exception as error:
            return error

    def _differences(self, ours: StepResult, plain: StepResult) -> Iterator[Difference]:
        bounds = self._verify.bounds
        trains = torch.is_grad_enabled()
        yield from compare_trees("loss" if trains else "output", ours.value, plain.value, bounds)
        yield from compare_named("gradient", ours.gradients, plain.gradients, bounds)
        statistics = self._subject.deferred_names()
        for name, buffer in ours.buffers.items():
            near = bounds.or_wider(DEFERRED) if name in statistics else bounds
            yield from compare_named("buffer", {name: buffer}, plain.buffers, near)
        for device, state in ours.random.items():
            if not torch.equal(state, plain.random[device]):
                yield Difference("random numbers", device, "the generator is in another state")

    def _origin(self, batch: Batch, before: KeptState, call: Callable[[], Any]) -> Divergence:
        """Repeats both runs to locate the difference, and restores the current state."""
        if self._executor.driver.captures:
            return Divergence(
                "The origin is unknown: captured graphs do not expose stage boundaries. Use "
                "capture=False to locate the difference."
            )
        loss_fn = loss_of(batch)
        after = self._subject.state(batch)
        parameters = list(self._subject.parameters(loss_fn).values())
        gradients = Gradients(parameters)
        with (
            _C.Undo(self._boundaries.stop),
            _C.Undo(after.put_back),
            _C.Undo(gradients.restore),
        ):
            gradients.begin(keep=False)
            before.put_back()
            try:
                return self._repeated(batch, before, call, gradients)
            except Exception as error:
                return Divergence(f"The origin is unknown: repeating the step raised {error!r}.")

    def _repeated(
        self, batch: Batch, before: KeptState, call: Callable[[], Any], gradients: Gradients
    ) -> Divergence:
        """The origin of a difference, found by repeating both runs."""
        reference, subject = Reference(self._subject, batch), self._subject
        seen = RunTensors()
        with self._executor.alone():
            watched = LayerByLayer(subject.stages, batch, seen.entering)
            plain = reference.run(before, watched, keep=False)
            own = reference.run(before, keep=False)
        gradients.put_aside(reference.leaves)
        self._boundaries.seen = ours_seen = RunTensors()
        ours = subject.result(call(), loss_of(batch))
        found = list(self._differences(ours, plain))
        if not found:
            if any(self._differences(ours, own)):
                return Divergence(
                    "The recorded calls of the model's forward agree with the pipeline. The "
                    "forward itself has an effect that is not in the recording."
                )
            return Divergence(
                "The difference did not recur when the step was repeated. The result depends on "
                "more than the model and its inputs, such as time or the order of threads."
            )
        first = first_difference(ours_seen, seen, len(subject.stages), self._verify.bounds)
        ends_wrong = found[0].kind in ("loss", "output")
        if first is not None and (not ends_wrong or first[0][0] < first[0][1]):
            return subject.told(*first)
        return self._inside(found)

    def _inside(self, found: Sequence[Difference]) -> Divergence:
        """The origin of a difference when all boundaries agree."""
        first, last = found[0], self._subject.stages[-1].index
        if first.kind in ("loss", "output"):
            return Divergence(
                f"The difference starts in stage {last} or in the loss: all inputs of the stage "
                "agree.",
                last,
            )
        places = map(self._subject.place_of, (one.name for one in found))
        stage = next((place[0] for place in places if place is not None), None)
        where = "outside of the stages" if stage is None else f"within stage {stage}"
        return Divergence(
            f"The difference starts {where}: all tensors at stage boundaries agree.", stage
        )

    def _error(
        self, name: str, found: Sequence[Difference], num_gradients: int, origin: Divergence
    ) -> VerifyError:
        counts = Counter(one.kind for one in found)
        counted = [
            f"{count} of {num_gradients} gradients" if kind == "gradient" else f"{kind} ({count})"
            for kind, count in counts.items()
        ]
        placed = [(one, self._subject.place_of(one.name)) for one in found]
        there = (pair for pair in placed if pair[1] and origin.stage in (None, pair[1][0]))
        summary = f"{name} of the pipeline differs from the plain model: {', '.join(counted)}"
        return VerifyError(summary, found, *next(there, placed[0]), origin)


def _raised(name: str, error: Exception) -> VerifyError:
    first = Difference("plain model", "", f"raises {error!r}, and the pipeline does not")
    summary = f"{name} of the pipeline differs from the plain model"
    return VerifyError(
        summary, [first], first, None, Divergence("The traceback of the plain model is above.")
    )
