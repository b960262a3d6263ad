"""A model in any form, as a chain of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.export import ExportedProgram

from ..notes import add_note
from ..runtime.stage.keywords import keywords_of
from ..tensors.trees import Call
from ..trace import Traced
from ..trace.opened import whole_by_names
from ..trace.origins import Origins
from ..trace.routes import Direct
from .balance import Balance, Partition, as_chain, partition
from .layers import refuse_hooks, refuse_lazy
from .profile import FirstArguments, as_in_training, kept_state
from .split_points import SplitAt, counts_at, names_of, whole_names
from .unequal import ALIKE, StageDevices


class Chain:
    """Layers that are called one after another.

    The first layer may take several arguments, every other layer takes the output of the layer
    before it. Layers whose forward names a keyword argument of the model get it as well.

    Attributes:
        layers: the layers by name.
        root: the module that the layers belong to; None if they were given as a list.
        taken: the names of the keyword arguments that any layer takes.
        of_first: the names of the keyword arguments that the first layer takes.
        origins: records the tensors that layers make, while origins are tracked.
    """

    def __init__(self, model: nn.Sequential | Sequence[nn.Module]) -> None:
        self.origins = Origins()
        self.layers = dict(as_chain(model))
        refuse_lazy(model)
        self.root = model if isinstance(model, nn.Module) else None
        if isinstance(model, nn.Sequential):
            refuse_hooks(model)
        layers = list(self.layers.values())
        self.taken = frozenset(name for layer in layers for name in keywords_of(layer))
        self.of_first = frozenset[str]() if not layers else keywords_of(layers[0])

    def first_arguments(self, sample: Any) -> tuple[Any, ...]:
        """The arguments of the first layer for a sample: a tuple of them, or the only one."""
        return sample if isinstance(sample, tuple) else (sample,)

    def cut(self, spans: Iterable[range], devices: Sequence[torch.device], direct: Direct) -> None:
        """Ignores the layers and the device of each stage, which only recorded models need."""

    def before_recording(self, settle: Callable[[], None]) -> None:
        """Ignores the function to call before a recording, as forwards are not recorded here."""

    def forget(self) -> None:
        """Does nothing when modules have changed, as forwards are not recorded here."""

    def enter(self, calls: Sequence[Call | None]) -> Sequence[Call | None]:
        """The arguments of the first layer, and the keyword arguments offered to all layers."""
        return calls

    def require_unchanged(self, modules: Mapping[str, nn.Module | None]) -> None:
        """Raises RuntimeError if a layer was replaced, added or removed, or the model has hooks."""
        now = {name: layer for name, layer in modules.items() if layer is not None}
        for name in () if now == self.layers else {**self.layers, **now}:
            if now.get(name) is not self.layers.get(name):
                raise RuntimeError(
                    f"layer {name!r} was replaced, added or removed, but the stages hold the "
                    "original layers. Make a new Pipeline"
                )
        if self.root is not None:
            refuse_hooks(self.root)


class RecordedChain(Traced):
    """A model with a forward of its own, as a chain of segments.

    Attributes:
        layers: the segments by name.
        root: the model.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        num_stages: int,
        split_at: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        if sample is None:
            raise TypeError(
                f"sample must be given to cut a {type(model).__name__}, whose own forward is "
                "recorded, got None. Give a microbatch: a tensor, a tuple of arguments, or a dict "
                "of keyword arguments"
            )
        refuse_lazy(model)
        self.root: nn.Module | None = model
        try:
            super().__init__(model, call_of(sample), num_stages, split_at, whole)
        except Exception as error:
            add_note(
                error, f"raised while the forward of {type(model).__name__} was recorded on sample="
            )
            raise
        self.layers: dict[str, nn.Module] = dict(self.segments)

    def first_arguments(self, sample: Any) -> tuple[Any, ...]:
        """The input of the first segment for a sample."""
        return tuple(self.environments([call_of(sample)]))

    def enter(self, calls: Sequence[Call | None]) -> Sequence[Call | None]:
        """The input of the first segment for each call; None stays.

        Raises:
            CutError: these inputs lead another way through the model than the sample.
        """
        entered = iter(self.environments([call for call in calls if call is not None]))
        return [None if call is None else ((next(entered),), {}) for call in calls]

    def require_unchanged(self, modules: Mapping[str, nn.Module | None]) -> None:
        """Raises RuntimeError if a module was replaced."""
        del modules
        self.refresh()


def open_model(
    model: nn.Module | Sequence[nn.Module] | ExportedProgram,
    sample: Any,
    num_stages: int,
    split_at: SplitAt | None,
    whole: Sequence[str] = (),
) -> Chain | RecordedChain:
    """The model as a chain of its layers; recorded, if the model has a forward of its own.

    Raises:
        TypeError: `model` is not a model, or a name is not a string.
        CutError: the model cannot be cut as asked.
    """
    names = whole_names(whole)
    if isinstance(model, ExportedProgram):
        model = model.module()
    if is_chain(model):
        chain = Chain(model)
        # Every layer of a chain stays whole.
        whole_by_names(_all_modules(chain.layers), names)
        return chain
    module = _require_module(model)
    return RecordedChain(module, sample, num_stages, names_of(split_at), names)


def share_out(
    chain: Chain | RecordedChain,
    num_stages: int,
    balance: Balance | None,
    sample: Any,
    split_at: SplitAt | None,
    devices: StageDevices = ALIKE,
) -> Partition:
    """The layers of the chain that form each stage.

    `devices` are those of the stages.

    Raises:
        TypeError, ValueError: as `partition`, or both `balance` and `split_at` are given.
        CutError: the stages cannot begin there.
    """
    if split_at is not None:
        if balance is not None:
            raise ValueError(
                "balance must be left out beside split_at, which says where stages begin, got "
                f"{balance!r}"
            )
        balance = counts_at(list(chain.layers), split_at, num_stages)
    balance = "parameters" if balance is None else balance
    if balance in ("time", "memory"):
        # The input is made in the modes of the measurement, because modes may steer a forward.
        root = list(chain.layers.values()) if chain.root is None else [chain.root]
        # Layers that are recorded do not have the model's own attributes.
        with kept_state(root), as_in_training(root):
            given = None if sample is None else FirstArguments(chain.first_arguments(sample))
            return partition(chain.layers, num_stages, balance, given, *devices)
    given = sample if isinstance(chain, Chain) else None
    return partition(chain.layers, num_stages, balance, given, *devices)


def max_stages(model: nn.Module | Sequence[nn.Module] | ExportedProgram) -> int:
    """The most stages that a model can have: the number of layers, or of modules that train."""
    if isinstance(model, ExportedProgram):
        return len(list(model.parameters()))
    if is_chain(model):
        return len(model)
    modules = _require_module(model).modules()
    return sum(bool(module._parameters) for module in modules)


def _require_module(model: object) -> nn.Module:
    if isinstance(model, type):
        raise TypeError(
            f"model must be an nn.Module or a list of them, got the class {model.__name__}. Make "
            f"the model first: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module or a list of them, got {type(model).__name__}. Give the "
            "model itself"
        )
    return model


def is_chain(model: object) -> TypeGuard[nn.Sequential | Sequence[nn.Module]]:
    """Whether the model only calls layers one after another."""
    if isinstance(model, nn.Sequential):
        return type(model).forward is nn.Sequential.forward and "forward" not in vars(model)
    return isinstance(model, Sequence | nn.ModuleList)


def _all_modules(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The layers and the modules in them, by name."""
    return {
        name: module
        for prefix, layer in layers.items()
        for name, module in layer.named_modules(prefix=prefix)
    }


def call_of(sample: Any) -> Call:
    """The sample as arguments: a dict by keyword, a tuple by position, else the only argument."""
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def calls_of(batches: Iterable[Any]) -> Iterator[Call]:
    """The arguments of each batch, as of `call_of`.

    Raises:
        TypeError: these are not batches that one can go through.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches must be an iterable of batches, got {type(batches).__name__}. Give a list, a "
            "generator or a DataLoader"
        )
    return map(call_of, batches)
