"""Training of a model for a measurement, after which the model is restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import _C
from ..partition.profile import as_in_training
from ..runtime.recompute.buffers import modules_in
from ..tensors.trees import tensors_of
from ..trace.kept_state import KeptState
from .model_face import Adopted


@contextmanager
def left_alone(
    models: Sequence[object],
    devices: Iterable[torch.device] = (torch.device("cpu"),),
    batch: object = (),
) -> Iterator[None]:
    """A context in which models train; it restores gradients and all other state.

    Args:
        models: modules, among other objects that are passed over, such as a plain loss function.
        devices: the devices whose random numbers are restored; those of the CPU always are.
        batch: a tree of tensors, which may train, and which layers may write.
    """
    # Stages run the model's parts, and its own mode and attributes are not those of its pipeline.
    roots = [model._chain.root for model in models if isinstance(model, Adopted)]
    models = [*models, *(root for root in roots if root is not None)]
    modules = modules_in(models)
    parameters = {p for module in modules for p in module._parameters.values() if p is not None}
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    # A kernel adds to these in place.
    mains = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    tensors = [gradient for gradient in mains if isinstance(gradient, Tensor)]
    state = KeptState(modules, devices, tensors=[*tensors, *tensors_of(batch)])
    with _C.Undo(_put_back, gradients), state.kept():
        for parameter in parameters:
            parameter.grad = None
        with as_in_training([model for model in models if isinstance(model, nn.Module)]):
            yield


def _put_back(gradients: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient
