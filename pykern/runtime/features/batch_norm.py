"""Running statistics of batch normalisation over the full batch, not one microbatch after another.

Each microbatch is normalised by its own statistics, as always. `running_mean` and `running_var`
are updated once per step, towards the mean and the unbiased variance of all rows of the batch. The
DeferredBatchNorm of torchgpipe (Kim et al., 2020, arXiv 2004.09910) does the same with the biased
variance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...plan import Kind
from ..executor import Executor
from ..stage.settings import Settings
from ..stage.stage import Run, Stage
from .feature import Feature, Made

# The base class of the 1d, 2d and 3d modules.
BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class _Seen:
    """The input of a call: number of values per channel, their mean, their biased variance."""

    count: int
    mean: Tensor
    variance: Tensor


class DeferredBatchNorm(Feature):
    """Updates running statistics when a step has succeeded, and leaves them alone when it fails.

    Only calls of an F count, not calls of an R. If a module is called several times for a
    microbatch, all calls count. Forwards without gradients update a module in train mode call by
    call, as without this feature: a stream of them may have no end.

    The modules have hooks until `close`.
    """

    def __init__(self) -> None:
        # The microbatch of the F that each stage is in.
        self._now: dict[int, int] = {}
        # Modules whose own updates are off now.
        self._silent: list[BatchNorm] = []
        self._seen: dict[BatchNorm, list[tuple[int, _Seen]]] = {}
        # Modules that have running statistics, each with the number of its stage and its hook.
        self._modules: dict[BatchNorm, tuple[int, RemovableHandle]] = {}
        # Whether steps are observed, which they are once there has been such a module.
        self._observes = False

    def attach(self, made: Made) -> None:
        """Finds the modules that have running statistics, and observes steps if any has."""
        # The modules' hooks have this feature, and a copy of a module copies its hooks: so the
        # feature does not have the executor. Nor do stages, since the executor has these, and goes
        # with its last reference.
        executor = weakref.ref(made.executor)
        for stage in made.executor.stages:
            self._find(made.executor, stage)
            stage.when_changed.append(partial(self._follow, executor, stage))

    def _find(self, executor: Executor, stage: Stage) -> None:
        """Hooks the modules of a stage that are new, and takes the hooks of removed ones away."""
        found = _tracked(module for layer in stage.originals for module in layer.modules())
        for module in self._of(stage) - found.keys():
            self._modules.pop(module)[1].remove()
        for module in found:
            if module not in self._modules:
                see = partial(self._see, stage.index)
                handle = module.register_forward_pre_hook(see, with_kwargs=True)
                self._modules[module] = stage.index, handle
        if found and not self._observes:
            self._observes = True
            executor.watch(self.around)
            executor.observe(self)

    def _of(self, stage: Stage) -> set[BatchNorm]:
        return {module for module, (index, _) in self._modules.items() if index == stage.index}

    def _follow(
        self, executor: Callable[[], Executor | None], stage: Stage, settings: Settings
    ) -> None:
        """Takes the modules that a stage has got since, as its step begins."""
        if _tracked(settings.modules).keys() != self._of(stage):
            running = executor()
            assert running is not None
            self._find(running, stage)
            self.begin_run()

    def close(self) -> None:
        """Takes the hooks away."""
        for _, handle in self._modules.values():
            handle.remove()

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call for an action: `call` itself, or for F a wrapper that notes the microbatch."""
        if kind is not Kind.F:
            return call
        return partial(self._forward, stage.index, call)

    def _forward(self, stage: int, call: Run, microbatch: int) -> None:
        self._now[stage] = microbatch
        try:
            call(microbatch)
        finally:
            del self._now[stage]

    def _see(
        self, stage: int, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if stage not in self._now or module not in self._seen:
            return
        values = (*arguments, *named.values())[0].detach()
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        dimensions = [dimension for dimension in range(values.dim()) if dimension != 1]
        variance, mean = torch.var_mean(values, dimensions, correction=0)
        seen = _Seen(values.numel() // values.size(1), mean, variance)
        self._seen[module].append((self._now[stage], seen))

    def begin_run(self) -> None:
        """Turns off the modules' own updates."""
        self.end_run()
        self._silent = [
            module
            for module in self._modules
            if module.training and module.track_running_stats and torch.is_grad_enabled()
        ]
        self._seen = {module: [] for module in self._silent}
        for module in self._silent:
            module.track_running_stats = False

    def succeed_run(self) -> None:
        """Updates the statistics of all modules."""
        # `no_grad` is not needed: these tensors do not require grad.
        updates = [
            update for module, seen in self._seen.items() for update in _updates(module, seen)
        ]
        # One call copies all: an interrupt between several calls would leave partial updates.
        if updates:
            buffers, values = zip(*updates, strict=True)
            torch._foreach_copy_(buffers, values)

    def end_run(self) -> None:
        """Turns the modules' own updates on again."""
        for module in self._silent:
            module.track_running_stats = True
        self._silent, self._seen = [], {}
        self._now.clear()


def _tracked(modules: Iterable[nn.Module]) -> dict[BatchNorm, None]:
    """The modules that have running statistics, each once, in their order."""
    return {
        module: None
        for module in modules
        if isinstance(module, BatchNorm) and module.running_mean is not None
    }


def _updates(
    module: BatchNorm, seen: Sequence[tuple[int, _Seen]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The buffers of a module, each with its new value."""
    if not seen:
        return
    # Sums run in the order of microbatches, whatever the order of the plan.
    calls = [one for _, one in sorted(seen, key=lambda pair: pair[0])]
    counts = [one.count for one in calls]
    total = sum(counts)
    mean = sum(count / total * one.mean for count, one in zip(counts, calls, strict=True))
    squares = sum(
        count * (one.variance + (one.mean - mean).square())
        for count, one in zip(counts, calls, strict=True)
    )
    factor = module.momentum
    if module.num_batches_tracked is not None:
        tracked = module.num_batches_tracked + 1
        yield module.num_batches_tracked, tracked
        factor = 1 / float(tracked) if factor is None else factor
    for buffer, value in (
        (module.running_mean, mean),
        (module.running_var, squares / (total - 1)),
    ):
        assert buffer is not None
        yield buffer, (1 - (factor or 0.0)) * buffer + (factor or 0.0) * value
