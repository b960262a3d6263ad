"""Refuses weights that a hook changes while microbatches are between forward and backward."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...plan import Kind
from ...torch_private import version_of
from ..stage.settings import Settings
from ..stage.stage import Run, Stage
from .feature import Feature, Made


class EarlyUpdates(Feature):
    """Refuses updates by hooks of parameters before the gradient of a parameter is complete.

    A hook of `register_post_accumulate_grad_hook` may step an optimizer. The plain loop runs the
    next forward with the new weights. In a stage, later forwards may have run with the old ones.

    Args:
        in_processes: whether gradients are added over processes when a step has run.
    """

    def __init__(self, *, in_processes: bool) -> None:
        self._in_processes = in_processes
        # The stages in which gradients of replicas are being added.
        self._reducing: set[int] = set()

    def attach(self, made: Made) -> None:
        """Attaches the feature to REDUCE alone."""
        self._executor = made.executor
        super().attach(made)

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call for an action: `call` itself, unless gradients of replicas are added there."""
        # Without `self`, since the executor keeps the call, and goes with its last reference.
        is_sum = kind is Kind.REDUCE
        return partial(_reduce, self._reducing, stage.index, call) if is_sum else call

    def step(self, scaler: object) -> AbstractContextManager[None] | None:
        """A context in which a hook behind the user's hooks looks at each parameter with hooks."""
        del scaler
        hooked = self._hooked()
        if not hooked:
            return None
        handles: list[RemovableHandle] = []

        def look() -> None:
            for held, stages in hooked.items():
                one = _Look(self, held, stages)
                handles.append(held.register_post_accumulate_grad_hook(one))

        def leave(_: BaseException | None) -> None:
            for handle in handles:
                handle.remove()

        # A generator would add a traceback to a layer's exception, which some exceptions refuse.
        return _C.Within(look, leave)

    def _hooked(self) -> dict[nn.Parameter, list[int]]:
        """The parameters with such hooks, each with the stages that use it."""
        found: dict[nn.Parameter, list[int]] = {}
        for stage in self._executor.stages:
            for held in (stage.settings or Settings(stage.originals)).parameters():
                if held.requires_grad and held._post_accumulate_grad_hooks:
                    found.setdefault(held, []).append(stage.index)
        return found

    def may_change(self, stages: Collection[int]) -> bool:
        """Whether a parameter of these stages may change now.

        Its gradient is complete, or no other microbatch has seen its old values.
        """
        if self._in_processes:
            return False
        if len(stages) > 1:
            return self._executor.ties.adds
        (number,) = stages
        if len(self._executor.replicas.each) > 1:
            return number in self._reducing
        stage = self._executor.stages[number]
        in_split = map(stage.has_weights, range(len(stage.outputs)))
        return not (any(stage.outputs) or stage.recomputed.cells or any(in_split))


def _reduce(reducing: set[int], stage: int, call: Run, microbatch: int) -> None:
    reducing.add(stage)
    try:
        call(microbatch)
    finally:
        reducing.discard(stage)


class _Look:
    """Looks at a parameter after its other hooks."""

    def __init__(self, updates: EarlyUpdates, held: nn.Parameter, stages: list[int]) -> None:
        self._updates = updates
        self._stages = set(stages)
        self._version = version_of(held)

    def __call__(self, held: Tensor) -> None:
        before, self._version = self._version, version_of(held)
        if before != self._version and not self._updates.may_change(self._stages):
            raise RuntimeError(
                "hooks must change a parameter with its last gradient in a step, got an earlier "
                f"change of one of shape {tuple(held.shape)} in stage {min(self._stages)}. Other "
                "microbatches have run with its old values. Count the calls of the hook, or step "
                "the optimizer after the pipeline's step"
            )
