"""PipelineStage: which module is which stage, and where. It needs no process group."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...runtime.microbatch import to_device
from ...tensors.trees import tensors_of
from . import ranks
from .recorded import RecordedStage, RunSegments

Keywords = Mapping[str, Any]


class PipelineStage:
    """A module as one stage of a pipeline; its parameters stay the same objects.

    Shapes need not be declared and may change from step to step. A stage's output is given
    to the next as positional arguments if it is a tuple or list, else as the only one; unlike
    torch's, it may hold anything.

    Args:
        submodule: called with the arguments of `step` in the first stage, with the output of the
            stage before in the others.
        stage_index: from 0.
        num_stages: of the whole pipeline.
        device: where it runs: a GPU, or a CPU worker, "cpu:0" and "cpu:1" being two of them. Stages
            on plain "cpu" each have a worker, or share one where the schedule says so.
        input_args: not needed, nor are the next three: there are no buffers to be allocated before.
        output_args: see input_args.
        output_grads: see input_args.
        input_grads: see input_args.
        group: None; there are no processes to be grouped.
        dw_builder: None; the runtime computes weight gradients itself.
        get_mesh: None; there are no meshes in one process.

    Raises:
        TypeError: the submodule is not an `nn.Module`.
        ValueError: there is no such stage, or what must be None is not.
        RuntimeError: there are more ranks than stages.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's arguments, in torch's order
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Any = None,
        get_mesh: Any = None,
    ) -> None:
        # Shapes come with the tensors.
        del input_args, output_args, output_grads, input_grads
        if not isinstance(submodule, nn.Module):
            raise TypeError(f"submodule must be an nn.Module, got {type(submodule).__name__}")
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"stage_index must be 0 to {num_stages - 1} with num_stages={num_stages}, got "
                f"{stage_index}"
            )
        for name, value in (("group", group), ("dw_builder", dw_builder), ("get_mesh", get_mesh)):
            if value is not None:
                raise ValueError(
                    f"{name} must be left out, got {value!r}. It is for stages in several processes"
                )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        # Now, for each rank's thread has a current device of its own.
        self.lane = _lane_of(self.device)
        self.group_rank = ranks.get_rank()
        self.group_size = ranks.get_world_size()
        if self.group_size > num_stages:
            raise RuntimeError(
                f"ranks must be at most {num_stages}, the number of stages, got {self.group_size}. "
                "Use fewer ranks, or more stages"
            )

    @property
    def is_first(self) -> bool:
        """Whether it gets the arguments of `step`."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its output goes to the loss."""
        return self.stage_index == self.num_stages - 1


class StageCall(nn.Module):
    """A stage as a layer, which passes the number of the microbatch along with the values.

    Attributes:
        keywords: of each microbatch, for the step that runs.
    """

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        module = stage.submod
        self.submod = module.segment_run if isinstance(module, RecordedStage) else module
        self._device = stage.device
        self._is_last = stage.is_last
        self.keywords: Sequence[Keywords] = ()

    def settle(self) -> None:
        """Is told that its parameters have been moved to where it runs."""
        if isinstance(self.submod, RunSegments):
            self.submod.place(next((p.device for p in self.submod.parameters()), self._device))

    def begin(self, keywords: Sequence[Keywords]) -> None:
        """Takes what a step gives it by name."""
        self.keywords = keywords
        if isinstance(self.submod, RunSegments):
            self.submod.refresh()

    def enter(self, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Arguments of the first stage, by microbatch."""
        if isinstance(self.submod, RunSegments):
            pairs = zip(arguments, self.keywords, strict=True)
            arguments = [(self.submod.enter(args, dict(named)),) for args, named in pairs]
            self.keywords = [{}] * len(arguments)
        return [((number, args),) for number, args in enumerate(arguments)]

    def forward(self, passed: tuple[int, tuple[Any, ...]]) -> Any:
        """The last stage's output as it is, that of others as the next one takes it."""
        microbatch, args = passed
        keywords = dict(self.keywords[microbatch])
        if keywords:
            # To where it computes: a batch may be on the host.
            here = (*tensors_of(args), *self.submod.parameters())
            keywords = to_device(keywords, here[0].device) if here else keywords
        output = self.submod(*args, **keywords)
        if self._is_last:
            return output
        return microbatch, tuple(output) if type(output) in (tuple, list) else (output,)


def _lane_of(device: torch.device) -> str:
    """A device as lanes are named."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def takes(module: nn.Module) -> set[str] | None:
    """The names of the keyword arguments of a module's forward; None if it may take any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}
