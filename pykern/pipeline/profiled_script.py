"""Profiles the first pipeline of a user's script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..attributes import replaced
from ..profiling import Report
from ..script import ScriptEnds, run_script
from .pipeline import Pipeline
from .steps import Steps


def profile_script(script: str, arguments: Sequence[str], steps: int = 5) -> Report:
    """Runs a script, unchanged, and profiles the first pipeline that takes two steps.

    The profile runs with the batch of the second step, in its place; then the script is ended. By
    then an optimizer has its state, and kernels are there.

    Args:
        script: its file.
        arguments: its arguments.
        steps: the number of steps, as for `Pipeline.profile`.

    Returns:
        The report.

    Raises:
        ValueError: there is no such file, no pipeline of it takes two steps by `Pipeline.step`, or
            the pipeline has an option that does not support `profile`.
        SystemExit: the script ends with a status that is not 0.
        ScriptFailed: the script raises another exception.
    """
    found = _SecondStep(steps)
    with replaced(Steps, "step", found.step_for()):
        try:
            run_script(script, arguments)
        finally:
            found.close()
    if found.refused is not None:
        raise found.refused
    if found.report is None:
        raise ValueError(
            f"{Path(script).name} must take two steps of a pykern.Pipeline by step, got "
            f"{found.num_steps}. Give it arguments for more, or profile with pipe.profile"
        )
    return found.report


class _SecondStep:
    """Waits for the second step of any pipeline.

    Attributes:
        num_steps: the most steps that a pipeline has taken.
        report: of the pipeline; None before.
        refused: why there is no report.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._taken: dict[int, int] = {}
        self._pipes: list[Steps] = []
        self._profiles = False
        self.report: Report | None = None
        self.refused: ValueError | None = None

    @property
    def num_steps(self) -> int:
        return max(self._taken.values(), default=0)

    def step_for(self) -> Any:
        """The function in the place of `step`."""
        step = Steps.step

        def watched(pipe: Steps, *inputs: Any, target: Any = None, **named: Any) -> Tensor:
            if self._profiles:
                return step(pipe, *inputs, target=target, **named)
            self._pipes.append(pipe)
            if self._taken.get(id(pipe), 0) and isinstance(pipe, Pipeline):
                named.pop("scaler", None)
                self._profile(pipe, inputs, target, named)
            self._taken[id(pipe)] = self._taken.get(id(pipe), 0) + 1
            return step(pipe, *inputs, target=target, **named)

        return watched

    def _profile(self, pipe: Pipeline, inputs: Any, target: Any, named: Any) -> None:
        self._profiles = True
        try:
            self.report = pipe.profile(*inputs, target=target, steps=self._steps, **named)
        except ValueError as error:
            self.refused = error
        raise ScriptEnds

    def close(self) -> None:
        """Ends the workers of pipelines that the script has left open."""
        for pipe in self._pipes:
            pipe.close()
