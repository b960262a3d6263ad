"""The model of a pipeline, with its own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..partition.balance import Partition
from ..partition.chain import Chain, RecordedChain
from ..plan import Plan
from ..runtime.batch import Batch
from ..runtime.features.batch_norm import BatchNorm
from ..runtime.loss import Losses
from ..runtime.random.seed import default_generator
from ..runtime.recompute.buffers import modules_in
from ..runtime.stage.stage import Stage
from ..tensors.trees import tensors_of
from ..trace.kept_state import KeptState
from .errors import Divergence
from .gradients import gradients_of


@dataclass(frozen=True)
class StepResult:
    """The results of a step, or of a forward, and the state behind it.

    Attributes:
        value: the loss of the batch, or its outputs.
        gradients: the gradients of all parameters, by name.
        buffers: all buffers, by name.
        random: the states of torch's default generators, by the name of the device.
    """

    value: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]
    random: Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """The model of a pipeline, as it was cut.

    Attributes:
        chain: the model as layers.
        cut: the layers of each stage.
        reduction: how the losses of microbatches are combined.
        deferred: whether running statistics move once in a step.
        stages: of the first replica.
        plan: the plan that runs.
    """

    chain: Chain | RecordedChain
    cut: Partition
    reduction: str
    deferred: bool
    stages: Sequence[Stage]
    plan: Plan

    def modules(self, loss_fn: object = None) -> list[nn.Module]:
        """All modules that run, each once."""
        return modules_in([self.chain.root, *self.chain.layers.values(), loss_fn])

    def named(self, loss_fn: object = None) -> Iterator[tuple[str, nn.Module]]:
        """All modules of the model by its own names, then those of the loss function."""
        if self.chain.root is not None:
            yield from self.chain.root.named_modules()
        else:
            for name, layer in self.chain.layers.items():
                yield from layer.named_modules(prefix=name)
        if isinstance(loss_fn, nn.Module):
            yield from loss_fn.named_modules(prefix="loss_fn")

    def parameters(self, loss_fn: object = None) -> dict[str, nn.Parameter]:
        """All parameters by name, each once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, module in self.named(loss_fn):
            for name, one in module.named_parameters(prefix=prefix, recurse=False):
                found.setdefault(id(one), (name, one))
        return dict(found.values())

    def buffers(self, loss_fn: object = None) -> dict[str, Tensor | None]:
        """All buffers by name."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self.named(loss_fn)
            for name, buffer in module._buffers.items()
        }

    def generators(self) -> dict[str, torch.Generator]:
        """The default generators of torch, which actions draw from, by the name of the device."""
        devices = {torch.device("cpu"), *(stage.device for stage in self.stages)}
        return {str(device): default_generator(device) for device in devices}

    def place_of(self, name: str) -> tuple[int, str] | None:
        """The stage and layer of a parameter or buffer; None for one of a loss function."""
        name = name.removesuffix(".main_grad")
        wanted = self.parameters().get(name, self.buffers().get(name))
        names = list(self.chain.layers)
        for stage, span in zip(self.stages, self.cut.stages, strict=True):
            layers = zip(names[span.start : span.stop], stage.originals, strict=True)
            for layer_name, layer in layers:
                if any(held is wanted for held in (*layer.parameters(), *layer.buffers())):
                    return stage.index, layer_name
        return None

    def layers_of(self, stage: int) -> str:
        """The first and last layer of a stage, for a message."""
        span, names = self.cut.stages[stage], list(self.chain.layers)
        first, last = names[span.start], names[span.stop - 1]
        return f"layer {first!r}" if first == last else f"layers {first!r} to {last!r}"

    def told(self, boundary: tuple[int, int], number: int, how: str) -> Divergence:
        """The origin of a difference whose first boundary is this."""
        stage, following = boundary
        what = "activations" if stage < following else "gradients"
        sentence = (
            f"The difference starts in stage {stage} ({self.layers_of(stage)}), microbatch "
            f"{number}: the inputs of the stage agree, but its {what} for stage {following} "
            f"differ: {how}."
        )
        return Divergence(sentence, stage, boundary, number)

    def deferred_names(self) -> set[str]:
        """The running statistics that move once in a step."""
        if not self.deferred:
            return set()
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named()
            if isinstance(module, BatchNorm)
            for name in ("running_mean", "running_var")
        }

    def refuse_hooks(self, loss_fn: object) -> None:
        """Raises RuntimeError if a hook may update weights, because the hook would run twice."""
        for name, parameter in self.parameters(loss_fn).items():
            if parameter._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"verify runs the plain model as well, and {name!r} has a hook of "
                    "register_post_accumulate_grad_hook, which would run twice. Remove the hook, "
                    "or use verify=False"
                )

    def state(self, batch: Batch) -> KeptState:
        """The state that a run of a batch may change."""
        given = tensors_of((batch.inputs, batch.target))
        devices = {stage.device for stage in self.stages}
        return KeptState(self.modules(loss_of(batch)), devices, tensors=given)

    def result(self, value: Any, loss_fn: object, *, copied: bool = False) -> StepResult:
        """The value given, with the state of now."""
        buffers = self.buffers(loss_fn)
        if copied:
            buffers = {
                name: None if one is None else one.detach().clone() for name, one in buffers.items()
            }
        gradients = gradients_of(self.parameters(loss_fn).items())
        random = {name: one.get_state() for name, one in self.generators().items()}
        return StepResult(value, gradients, buffers, random)


def loss_of(batch: Batch) -> object:
    """The loss function of a step; None in a forward."""
    return batch.finish.function if isinstance(batch.finish, Losses) else None
