"""The names and modes of a model, in the module that runs it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..partition.chain import Chain, RecordedChain
from ..runtime.loss import Loss

# The attributes of a module that hold its contents and the hooks of its state.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Adopted(nn.Module):
    """The half of a pipeline that stands for the model it was made of."""

    _chain: Chain | RecordedChain
    _loss_fn: Loss | None

    def _adopt(self, chain: Chain | RecordedChain, loss_fn: Loss | None) -> None:
        """Takes the names and modes of the model."""
        root = nn.Module() if chain.root is None else chain.root
        named = chain.layers if chain.root is None else {**vars(root)["_modules"]}
        for name in (*named, *root._parameters, *root._buffers):
            if hasattr(self, name):
                raise ValueError(
                    "names of layers must differ from those that Pipeline uses itself, got "
                    f"{name!r}. Rename the layer"
                )
        if chain.root is None:
            for name, layer in named.items():
                self.add_module(name, layer)
            self.training = any(layer.training for layer in named.values())
        else:
            # The pipeline shares the model's dictionaries, so that it has every new attribute too.
            for held in _SHARED:
                vars(self)[held] = vars(root)[held]
        self._chain = chain
        # Setting the attribute would register a loss that is a module as a part of the model.
        vars(self)["_loss_fn"] = loss_fn

    @property
    def training(self) -> bool:
        """The mode of the model, which `train` and `eval` of either set."""
        chain = vars(self).get("_chain")
        root = None if chain is None else chain.root
        return vars(self)["training"] if root is None else root.training  # type: ignore[no-any-return]

    @training.setter
    def training(self, mode: bool) -> None:
        chain = vars(self).get("_chain")
        root = None if chain is None else chain.root
        if root is None:
            vars(self)["training"] = mode
        else:
            root.training = mode

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the model, whose own `train` may keep some modules in eval mode."""
        root = self._chain.root
        if root is None:
            return super().train(mode)
        root.train(mode)
        return self

    @property
    def hf_device_map(self) -> dict[str, str]:
        """Devices by the names of parameters.

        Accelerate leaves a model where it is that has this, and the Trainer of Hugging Face, too.
        """
        return {name: str(parameter.device) for name, parameter in self.named_parameters()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the model, with its versions, hooks and extra state."""
        root = self._chain.root
        if root is None:
            return super().state_dict(*args, **kwargs)
        return root.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state into the model with the model's own method."""
        root = self._chain.root
        if root is None:
            return super().load_state_dict(*args, **kwargs)
        return root.load_state_dict(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: layers run on workers, where a compiled forward of the pipeline is unknown."""
        del args, kwargs
        raise RuntimeError(
            "compile must be chosen when a pipeline is made. Use Pipeline(..., compile='stages'), "
            "or call compile() of each layer before"
        )

    def __getattr__(self, name: str) -> Any:
        """A public attribute of the model, such as its `config`; its methods are refused."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            chain = vars(self).get("_chain")
            root = None if chain is None else chain.root
            if name.startswith("_") or root is None or not hasattr(root, name):
                raise
            value = getattr(root, name)
            if not inspect.ismethod(value):
                return value
        raise AttributeError(
            f"{name} must be called on the model itself, since it is a method of "
            f"{type(root).__name__}, which would not run on the pipeline's devices. Keep the model "
            f"that the pipeline was made of, and call model.{name}()"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every device is checked before any tensor changes.
        for device in {tensor.device for tensor in (*self.parameters(), *self.buffers())}:
            moved = fn(torch.empty(0, device=device)).device
            if moved == device:
                continue
            if sys._getframe(1).f_code is not nn.Module._apply.__code__:
                raise RuntimeError(
                    "the devices of a pipeline must stay as they were when it was made, got "
                    f"{moved} for layers on {device}. Make a new one: Pipeline(..., devices=...)"
                )
            # A module around the pipeline is moved, as Lightning does: layers stay.
            fn = partial(_without_move, fn)
            break
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch calls this if the pipeline is a part of another module.
        root = self._chain.root
        load = super()._load_from_state_dict if root is None else root._load_from_state_dict
        load(*args, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, because it holds threads or streams. Copy "
            "the model that it was made of, which has the same parameters, as in "
            "AveragedModel(model) or copy.deepcopy(model), or save the state_dict()"
        )


def _without_move(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """The tensor with the type that a function gives it, on its own device."""
    return tensor.to(fn(tensor.new_empty(0)).dtype)
