"""The plain model run microbatch by microbatch, in the documented order, without the runtime."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_forward_pre_hooks,
    register_module_forward_pre_hook,
)

from .. import _C
from ..runtime import microbatch
from ..runtime.batch import Batch
from ..runtime.microbatch import to_device
from ..runtime.stage.keywords import keywords_of
from ..runtime.stage.skips import apart
from ..runtime.stage.stage import Stage
from ..trace import Environment
from ..trace.cut_tape import Values
from ..trace.opened import is_compiled
from ..trace.routes import BATCH

# Called where each stage begins, with its number.
Begin = Callable[[int], None]
# Gives the model's output for a microbatch, and calls a `Begin` on the way.
Forward = Callable[[int, Begin], Any]


# Called with a stage, a microbatch and the trees that enter the stage.
Entering = Callable[[int, int, list[Any]], list[Any]]


class CannotFollow(Exception):
    """The model's own forward does not tell where a stage begins."""


class OwnForward:
    """The model's own forward, called as a user would call the model.

    Args:
        model: a model with its own forward, all on one device.
        starts: by stage, the module that the stage begins with. The number of the call is appended
            if it is not the first: "layers.3 (2)".
        batch: provides the microbatches.
    """

    def __init__(self, model: nn.Module, starts: Sequence[str], batch: Batch) -> None:
        self._model = model
        self._parts = microbatch.split(batch.inputs, batch.rows)
        self._stage_of = {name: stage for stage, name in enumerate(starts) if stage > 0}
        known = dict(model.named_modules())
        starting = [name.partition(" ")[0] for name in self._stage_of]
        self._names = {known.get(name): name for name in starting}

    def __call__(self, number: int, begin: Begin) -> Any:
        """The output of a microbatch.

        Raises:
            CannotFollow: a stage begins elsewhere than before the call of a module, or a module is
                compiled.
        """
        # torch would recompile for a hook.
        if None in self._names or is_compiled(self._model):
            raise CannotFollow
        left = dict(self._stage_of)
        calls: Counter[str] = Counter()
        caller = get_ident()

        def called(module: nn.Module, _: object) -> None:
            name = self._names.get(module)
            if name is None or get_ident() != caller:
                return
            calls[name] += 1
            stage = left.pop(name if calls[name] == 1 else f"{name} ({calls[name]})", None)
            if stage is not None:
                begin(stage)

        # A hook of their own would be seen by modules that then compute in another way, such as
        # torch's TransformerEncoderLayer.
        with _C.Undo(_unhook, called):
            register_module_forward_pre_hook(called)
            begin(0)
            args, kwargs = self._parts[number]
            output = self._model(*args, **kwargs)
        if left:
            raise CannotFollow
        return output


def _unhook(called: object) -> None:
    # By the hook, not by what torch returns for it, which an interrupt may have kept from here.
    for key, hook in list(_global_forward_pre_hooks.items()):
        if hook is called:
            _global_forward_pre_hooks.pop(key, None)


class LayerByLayer:
    """The layers one after another, in one graph, as a loop over the layers calls them.

    The layers of a model with its own forward are the recorded calls.

    Args:
        stages: of the first replica.
        batch: provides the microbatches.
        entering: gets the stage, the microbatch and the trees from other stages, and returns the
            trees for the stage.
    """

    def __init__(
        self, stages: Sequence[Stage], batch: Batch, entering: Entering = lambda *of: of[2]
    ) -> None:
        self._stages = stages
        self._batch = batch
        self._entering = entering

    def __call__(self, number: int, begin: Begin) -> Any:
        """The output of a microbatch."""
        call = self._batch.calls[number]
        assert call is not None
        args, kwargs = call
        # By receiving stage: values that skip stages, each with its sender.
        past: dict[int, list[tuple[int, Values]]] = defaultdict(list)
        if args and isinstance(args[0], Environment):
            args = (_send(args[0], BATCH, past), *args[1:])
        for stage in self._stages:
            begin(stage.index)
            parcels = past.pop(stage.index, [])
            of_batch = [values for sender, values in parcels if sender == BATCH]
            of_stages = [values for sender, values in parcels if sender != BATCH]
            if stage.index > 0:
                near, *of_stages = self._entering(stage.index, number, [args[0], *of_stages])
                args = (near,)
            for values in (*of_batch, *of_stages):
                args = (Environment(args[0].cut_tape, {**args[0].values, **values}),)
            args = to_device(args, stage.device)
            value = _called(stage, args, to_device(kwargs, stage.device))
            args = (_send(value, stage.index, past),)
        return args[0]


def _send(value: Any, stage: int, past: dict[int, list[tuple[int, Values]]]) -> Any:
    """The value for the next stage; notes the values that skip that stage."""
    near, farther = apart(value, stage)
    for reader, numbers in farther:
        past[reader].append((stage, {number: value.values[number] for number in numbers}))
    return near


def _called(stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for layer in stage.originals:
        named = {name: kwargs[name] for name in kwargs if name in keywords_of(layer)}
        args = (layer(*args, **named),)
    return args[0]
