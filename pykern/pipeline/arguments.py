"""Checks that a model and its loss take the arguments of a call, before any worker starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .. import schedules
from ..one_of import nearest
from ..partition.chain import Chain, RecordedChain
from ..plan import Plan
from ..runtime.loss import Loss
from ..search import search
from ..tensors.trees import Call

# Names that other libraries use for arguments of a pipeline.
_MEANT = {
    "activationcheckpointing": "recompute",
    "checkpoint": "recompute",
    "checkpointing": "recompute",
    "chunks": "microbatches",
    "criterion": "loss_fn",
    "loss": "loss_fn",
    "nummicrobatches": "microbatches",
    "nmicrobatches": "microbatches",
    "numdevices": "devices",
    "numstages": "devices",
    "split": "balance",
    "splitspec": "split_at",
    "stages": "devices",
    "tp": "tensor_parallel",
}
# Arguments that `step` and `map` take themselves.
_OF_STEP = ("target", "scaler")


def refuse_unknown_options(
    schedule: str | Plan | Callable[..., Plan], options: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Raises TypeError if the schedule does not have an option.

    Args:
        schedule: a name or function of `pykern.schedules`, "auto", or a plan, which has no options.
        options: the options for the schedule.
        arguments: the names of the pipeline's own arguments.
    """
    if isinstance(schedule, Plan) or not options:
        return
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "given")
    make: object = schedule
    if isinstance(schedule, str):
        make = search.auto if schedule == "auto" else schedules.by_name.get(schedule)
    signature = _signature(make)
    found = [] if signature is None else list(signature.parameters.values())
    if not found or any(each.kind is each.VAR_KEYWORD for each in found):
        return
    taken = [each.name for each in found[schedules.NUM_COUNTS :]]
    for option in options:
        if option not in taken:
            near = nearest(option, taken) or nearest(option, arguments, _MEANT)
            instead = f"Did you mean {near}=?" if near else f"Omit {option}"
            raise TypeError(
                f"arguments must be the pipeline's own or options of the schedule {name!r} "
                f"({', '.join(taken) or 'it has no options'}), got {option}=. {instead}"
            )


class Arguments:
    """Checks each form of a call of a pipeline once.

    Args:
        chain: the model.
        loss_fn: the pipeline's loss function, or None.
    """

    def __init__(self, chain: Chain | RecordedChain, loss_fn: Loss | None) -> None:
        self._chain = chain
        self._loss_fn = loss_fn
        self._seen: set[object] = set()

    def require(self, call: Call, *, target: Any = None, loss: Loss | None = None) -> None:
        """Raises TypeError if the model's forward or the loss would do so for this call.

        Args:
            call: arguments of the model.
            target: the target of a step.
            loss: the loss of a step; None for a forward.
        """
        args, named = call
        form = (len(args), *named, target is None, loss is None, loss is self._loss_fn)
        if form in self._seen:
            return
        self._require_names(named, is_step=loss is not None)
        self._require_call(args, named, may_target=loss is not None and target is None)
        if loss is not None and loss is self._loss_fn:
            require_target(loss, target)
        self._seen.add(form)

    def _require_names(self, named: Mapping[str, Any], *, is_step: bool) -> None:
        if not isinstance(self._chain, Chain):
            return
        for name in named:
            if name not in self._chain.taken:
                taken = sorted(self._chain.taken)
                near = nearest(name, (*taken, *(_OF_STEP if is_step else ())))
                instead = f"Did you mean {near}=?" if near else f"Omit {name}"
                raise TypeError(
                    "arguments by name must be those that a layer's forward names "
                    f"({', '.join(taken) or 'here no layer names any'}), got {name}=. {instead}"
                )

    def _require_call(
        self, args: Sequence[Any], named: Mapping[str, Any], may_target: bool
    ) -> None:
        chain = self._chain
        first: nn.Module | None = next(iter(chain.layers.values()))
        if isinstance(chain, RecordedChain):
            first = chain.root
        else:
            named = {name: named[name] for name in named if name in chain.of_first}
        # Hooks may change the arguments before forward gets them.
        if first is None or first._forward_pre_hooks:
            return
        signature = _signature(first.forward)
        if (error := _refusal(signature, args, named)) is None:
            return
        instead = "Call the pipeline as the model itself is called"
        if may_target and args and _refusal(signature, args[:-1], named) is None:
            instead = "Name the target of the loss: step(x, target=y)"
        raise TypeError(
            f"inputs must be those of {type(first).__name__}.forward{_names(signature)}, "
            f"got {_counted(args, named)}: {error}. {instead}"
        )


def require_functions(loss_fn: object, optimizer: object) -> None:
    """Raises TypeError unless the loss is a function, and the optimizer one or None."""
    for name, value, example in (
        ("loss_fn", loss_fn, "F.cross_entropy"),
        ("optimizer", optimizer, "a class of torch.optim"),
    ):
        if not callable(value) and not (name == "optimizer" and value is None):
            raise TypeError(
                f"{name} must be callable, got {type(value).__name__}. Give a function, such as "
                f"{example}"
            )


def require_target(loss: Loss, target: Any) -> None:
    """Raises TypeError if a loss does not take the target, or needs a missing target."""
    function = loss
    if isinstance(loss, nn.Module):
        if loss._forward_pre_hooks:
            return
        function = loss.forward
    signature = _signature(function)
    if _refusal(signature, ("output",) if target is None else ("output", "target"), {}) is None:
        return
    taken = f"{getattr(loss, '__name__', type(loss).__name__)}{_names(signature)}"
    if target is None:
        raise TypeError(f"target must be given for the loss {taken}, got None. Give it by target=")
    raise TypeError(
        f"loss_fn must take an output and a target, got {taken}. Omit target= for a loss of the "
        "output alone, and give a target of the model's own by position"
    )


def _signature(function: Any) -> inspect.Signature | None:
    """The signature; None if Python does not know it."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _refusal(
    signature: inspect.Signature | None, args: Sequence[Any], named: Mapping[str, Any]
) -> str | None:
    """The reason why a function refuses these arguments; None if it takes them, or is unknown."""
    if signature is None:
        return None
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        return str(error)
    return None


def _names(signature: inspect.Signature | None) -> str:
    return "()" if signature is None else f"({', '.join(signature.parameters)})"


def _counted(args: Sequence[Any], named: Mapping[str, Any]) -> str:
    by_name = f" and {', '.join(named)} by name" if named else ""
    return f"{len(args)} by position{by_name}"
