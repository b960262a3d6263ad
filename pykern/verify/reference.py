"""Runs a step of the plain model, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _C
from ..partition.chain import Chain
from ..runtime import microbatch
from ..runtime.autograd.graph import leaves_of
from ..runtime.batch import Batch
from ..runtime.loss import InOnePass, Losses
from ..runtime.microbatch import to_device
from ..runtime.random.seed import action_seed
from ..runtime.recompute.recompute import INPUTS
from ..tensors.trees import tensors_of
from ..trace.kept_state import KeptState
from .deferred import WholeBatch
from .gradients import Gradients
from .own import Sums
from .plain import CannotFollow, Forward, LayerByLayer, OwnForward
from .subject import StepResult, Subject, loss_of


class Reference:
    """Runs the plain model.

    Attributes:
        leaves: the tensors that backwards have reached, such as those that the loss names.
    """

    def __init__(self, subject: Subject, batch: Batch) -> None:
        self._subject = subject
        self._batch = batch
        self._loss_fn = loss_of(batch)
        self._generators = list(subject.generators().values())
        self._drawn = False
        self.leaves: list[Tensor] = []
        rows = batch.rows
        self._weights = [1.0 if subject.reduction == "sum" else n / sum(rows) for n in rows]
        self._targets = None if batch.target is None else microbatch.split(batch.target, rows)
        # A loss that adds to gradients itself must not add them twice.
        self._once = batch.levels == () or not any(level in INPUTS for level in batch.levels[-1])

    def run(
        self, before: KeptState, forward: Forward | None = None, *, keep: bool = True
    ) -> StepResult:
        """The results of the plain model; the state before is restored.

        Args:
            before: the current state.
            forward: the forward to run; None for the model's own, if it shows where stages begin.
            keep: whether gradients are added to the existing gradients.
        """
        own = self._own()
        last = LayerByLayer(self._subject.stages, self._batch)
        parameters = list(self._subject.parameters(self._loss_fn).values())
        gradients = self._gradients = Gradients(parameters)
        num_threads = torch.get_num_threads()
        for one in (forward or own or last, last):
            with (
                _C.Undo(torch.set_num_threads, num_threads),
                _C.Undo(torch.clear_autocast_cache),
                _C.Undo(gradients.restore),
                _C.Undo(before.put_back),
                suppress(CannotFollow),
            ):
                gradients.begin(keep=keep)
                self._take_threads(num_threads)
                return self._run(one)
        raise AssertionError("layer by layer every stage is met")

    def _own(self) -> Forward | None:
        """The model's own forward, if the model has one and is on one device."""
        subject = self._subject
        if subject.chain.root is None or isinstance(subject.chain, Chain):
            return None
        if len({stage.device for stage in subject.stages}) > 1:
            return None
        names = subject.cut.layer_names
        starts = [names[span.start] for span in subject.cut.stages]
        return OwnForward(subject.chain.root, starts, self._batch)

    def _run(self, forward: Forward) -> StepResult:
        subject, batch = self._subject, self._batch
        behind = self._take_seed()
        self._drawn = False
        num_replicas = subject.plan.placement.num_replicas
        modules = subject.modules(self._loss_fn)
        sums = Sums(modules, subject.stages, num_replicas)
        own = [(one, one.get_state()) for one in _held_generators(modules)]
        ran = [number for number, rows in enumerate(batch.rows) if rows]
        parts: dict[int, Any] = {}
        deferred = WholeBatch(modules if subject.deferred else ())
        deferred.begin()
        for replica in range(num_replicas):
            for number in ran:
                if number % num_replicas == replica:
                    parts[number] = self._microbatch(forward, number, sums, replica)
        sums.add()
        deferred.move()
        self._drawn = self._drawn or any(not torch.equal(one.get_state(), s) for one, s in own)
        for generator, state in behind.items():
            generator.set_state(state)
        if self._drawn:
            self._take_seed()
        return subject.result(self._together(parts), self._loss_fn, copied=True)

    def _take_seed(self) -> dict[torch.Generator, Tensor]:
        """Draws the step's number; returns the earlier states of the generators."""
        behind = {generator: generator.get_state() for generator in self._generators}
        self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return behind

    def _microbatch(self, forward: Forward, number: int, sums: Sums, replica: int) -> Any:
        """The loss of a microbatch, whose gradients are added, or its output."""
        begun: list[Tensor] = []

        def begin(stage: int) -> None:
            self._look(begun)
            for generator in self._generators:
                generator.manual_seed(action_seed(self._seed, stage, number))
            begun[:] = [generator.get_state() for generator in self._generators]
            sums.use(replica, stage)

        output = forward(number, begin)
        if not isinstance(self._batch.finish, Losses):
            self._look(begun)
            return output
        start, loss = self._start(output, number)
        self._look(begun)
        if start:
            found = leaves_of(start[0])
            self.leaves += found
            self._gradients.put_aside(found)
            torch.autograd.backward(*start)
        return loss

    def _look(self, begun: Sequence[Tensor]) -> None:
        pairs = zip(self._generators, begun, strict=False)
        self._drawn = self._drawn or any(not torch.equal(one.get_state(), s) for one, s in pairs)

    def _start(
        self, output: Any, number: int
    ) -> tuple[tuple[Sequence[Tensor], Sequence[Tensor | None]] | None, Tensor]:
        """The tensors and gradients that backward starts from, and the loss of a microbatch."""
        losses = cast(Losses, self._batch.finish)
        weight = self._weights[number]
        arguments = [output]
        if self._targets is not None:
            devices = [tensor.device for tensor in tensors_of(output)]
            target = self._targets[number]
            target = to_device(target, devices[0]) if devices else target
            arguments.append(target)
            if self._once and losses.is_in_one_pass:
                share = weight if losses.scale is None else losses.scale.to(devices[0]) * weight
                function = cast(InOnePass, losses.function)
                ended = function.with_gradients(output, target, share)
                if ended is not None:
                    return (ended.outputs, ended.gradients), ended.loss
        loss = losses.function(*arguments)
        weighted = loss * weight
        if losses.scale is not None:
            weighted = weighted * losses.scale.to(weighted.device)
        return (([weighted], [None]) if weighted.requires_grad else None), loss.detach()

    def _together(self, parts: Mapping[int, Any]) -> Any:
        """The loss of the batch, or its outputs."""
        ran = sorted(parts)
        weights = [self._weights[number] for number in ran]
        values = [parts[number] for number in ran]
        if not isinstance(self._batch.finish, Losses):
            return microbatch.merge(values, weights)
        terms = [value.to(values[0].device) * w for value, w in zip(values, weights, strict=True)]
        return sum(terms[1:], terms[0])

    def _take_threads(self, num_threads: int) -> None:
        """Uses a worker's number of threads, which may decide the order of sums in products."""
        if self._subject.stages[0].device.type == "cpu":
            torch.set_num_threads(max(1, num_threads // self._subject.plan.num_devices))


def _held_generators(modules: Sequence[nn.Module]) -> list[torch.Generator]:
    """The generators that modules keep as attributes."""
    held = [value for module in modules for value in vars(module).values()]
    return [value for value in held if isinstance(value, torch.Generator)]
