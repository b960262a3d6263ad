"""Refuses layers and losses whose weights cannot have versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ..stage.layer_copies import refuse_to_copy, trains
from ..stage.settings import Settings

WHY = "a schedule that updates weights within a step cannot run it"


def refuse_unversioned(
    layers: Mapping[str, nn.Module], spans: Sequence[range], loss_fn: object
) -> None:
    """Raises ValueError if the weights of any stage cannot have versions.

    Weights cannot have versions if the loss trains, stages share parameters, parameters share
    memory, or a copy cannot take the place of its layer.

    Args:
        layers: by name.
        spans: by stage, the range of its layers.
        loss_fn: of the last stage.
    """
    if trains(loss_fn, set()):
        raise ValueError(
            f"loss_fn must have no parameters that train, got some: {WHY}. Give them to the last "
            "layer"
        )
    refuse_to_copy(layers, None, WHY, in_order=True)
    names = list(layers)
    owner: dict[object, tuple[int, str]] = {}
    for stage, span in enumerate(spans):
        for name in names[span.start : span.stop]:
            for key, parameter in layers[name].named_parameters():
                _refuse_parameter(f"{name}.{key}", parameter, stage, owner)


def _refuse_parameter(
    name: str, parameter: nn.Parameter, stage: int, owner: dict[object, tuple[int, str]]
) -> None:
    if hasattr(parameter, "main_grad"):
        raise ValueError(
            f"{name} must collect gradients in .grad, got a main_grad: {WHY}. Remove it"
        )
    if parameter.numel() == 0:
        return
    first, other = owner.setdefault(id(parameter), (stage, name))
    if first != stage:
        raise ValueError(
            f"{other} (stage {first}) and {name} (stage {stage}) must be two parameters, got one, "
            "of which both stages would have versions. Cut so that they share a stage "
            "(balance=[...]), or untie them"
        )
    place = parameter.untyped_storage().data_ptr()
    same, other = owner.setdefault(("storage", place), (id(parameter), name))
    if same != id(parameter):
        raise ValueError(
            f"{other} and {name} must have memory of their own, got shared memory, but each has "
            "versions of its own. Use clone() for one"
        )


def refuse_shared(settings: Iterable[Settings | None]) -> None:
    """Raises RuntimeError if stages now share parameters or modules."""
    seen: set[int] = set()
    for stage, of_stage in enumerate(settings):
        assert of_stage is not None
        ids = of_stage.ids()
        if not seen.isdisjoint(ids):
            raise RuntimeError(
                f"stage {stage} must keep parameters and modules of its own, got one that an "
                "earlier stage has by now, of which both would have versions. Untie them"
            )
        seen |= ids
