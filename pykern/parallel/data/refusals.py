"""The steps and models that processes cannot train together, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ...runtime.stage.layer_copies import trains
from ..peers.errors import PeerError
from ..peers.exchange import PeerMessage


def refuse_foreign_loss(loss_fn: object, layers: Iterable[nn.Module]) -> None:
    """Refuses a loss with parameters of its own, whose gradients nobody would sum.

    Raises:
        ValueError: it trains what no layer has.
    """
    if trains(loss_fn, {parameter for layer in layers for parameter in layer.parameters()}):
        raise ValueError(
            "loss_fn must train parameters of the model alone, whose gradients processes sum, got "
            "one that trains others. Give these parameters to the last layer"
        )


def refuse_main_grads(model: nn.Module) -> None:
    """Raises ValueError if a parameter collects gradients elsewhere than in `.grad`."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"{name} must collect gradients in .grad, which process_group sums, got a "
                "main_grad. Remove it"
            )


def refuse_others(said: Sequence[PeerMessage], own: PeerMessage) -> None:
    """Raises PeerError if a process of the group begins another step than this process."""
    for rank, other in enumerate(said):
        if other.is_local != own.is_local:
            ours, its = ("in", "out of") if own.is_local else ("out of", "in")
            raise PeerError(
                f"this step is {ours} no_sync here and {its} it in process {rank} of the group. "
                "Use no_sync for the same steps in every process"
            )
        if other.scale != own.scale:
            raise PeerError(
                f"this step scales its loss by {own.scale:g} here and by {other.scale:g} in "
                f"process {rank} of the group. Give step a scaler in every process, each with the "
                "same state"
            )
        if other.digest != own.digest:
            raise PeerError(
                f"process {rank} of the group has other parameters or buffers than this one, or "
                "trains others. Load the same state, or seed all processes alike"
            )


def refuse_failures(said: Sequence[PeerMessage], when: str, consequence: str) -> None:
    """Raises PeerError where a process of the group has failed."""
    for rank, message in enumerate(said):
        if message.failure:
            raise PeerError(
                f"process {rank} of the group has failed {when}: {message.failure}; {consequence}"
            )
