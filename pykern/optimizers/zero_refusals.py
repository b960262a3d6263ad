"""The pipelines, optimizers and parameters that ZeRO cannot have, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..parallel.data.data import DataParallel
from ..pipeline.pipeline import Pipeline
from ..tensors.dtensor import is_dtensor
from .inner import require_arguments

_REASONS = {
    2: "gradients add up over the microbatches of a step, so each process needs all of its own "
    "until a stage's last backward; from then on stage 1 keeps the shared-out sums alone",
    3: "every forward and backward of every microbatch would gather the stage's parameters again, "
    "with all other processes waiting for it; cut the model into more stages instead",
}

# Optimizers whose update of a value depends on the rest of its parameter.
_OF_WHOLE = (torch.optim.Adafactor, torch.optim.Muon)


def data_of(pipe: Pipeline, optimizer_class: object, stage: int) -> DataParallel:
    """The part of a pipeline that talks to its peers.

    Raises:
        TypeError: the optimizer is not a class, or looks at all parameters at once.
        ValueError: the stage is not 1, or the pipeline has no `process_group`.
    """
    require_arguments(pipe, optimizer_class, "Processes step parameters separately")
    if not isinstance(optimizer_class, type):
        raise TypeError(
            "optimizer_class must be a class, as torch's ZeroRedundancyOptimizer needs, got a "
            f"{type(optimizer_class).__name__}. Give its arguments as keywords"
        )
    if stage != 1:
        reason = _REASONS.get(stage, "ZeRO has stages 1, 2 and 3")
        raise ValueError(f"stage must be 1, got {stage!r}: {reason}")
    if pipe._data is None:
        raise ValueError(
            "the pipeline must have a process_group, whose processes share the state of a "
            "ZeroOptimizer, got one without. Make it with Pipeline(..., process_group=...)"
        )
    return pipe._data


def require_steppable(
    optimizer_class: type[Optimizer], stepped: Mapping[Tensor, nn.Parameter]
) -> None:
    """Refuses what processes cannot step apart, or send.

    Args:
        optimizer_class: the class of the optimizer.
        stepped: the tensor that is stepped for each parameter of the pipeline.

    Raises:
        TypeError: the optimizer looks at all parameters at once, or at whole parameters of which
            this process has parts; parameters are of several types.
        ValueError: a parameter is not contiguous.
    """
    parameters = list(stepped.values())
    if issubclass(optimizer_class, _OF_WHOLE) and any(map(is_dtensor, stepped)):
        raise TypeError(
            "optimizer_class must step each value of a parameter alone beside tensor_parallel, got "
            f"{optimizer_class.__name__}, which takes rows and columns of whole parameters. Use "
            "AdamW"
        )
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) > 1:
        raise TypeError(
            "parameters must have one type for torch's ZeroRedundancyOptimizer, got "
            f"{', '.join(dtypes)}"
        )
    for parameter in parameters:
        if not parameter.is_contiguous():
            raise ValueError(
                "parameters must be contiguous to be sent between processes, got shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}. Use contiguous()"
            )
