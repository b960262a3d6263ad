"""Which modules of a model are looked into, so that it can be cut within them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..tensors.parameters import num_values
from ..torch_private import HOOKS
from .errors import CutError


def require_module(argument: str, name: str, modules: Iterable[str]) -> None:
    """Raises CutError where a name in an argument is not that of a module in the model."""
    if name not in modules or name == "":
        near = ", ".join([known for known in modules if known][:12])
        raise CutError(
            f"{argument} must hold names of modules in the model, got {name!r}; it has {near}, ..."
        )


def whole_by_names(modules: Mapping[str, nn.Module], names: Iterable[str]) -> set[nn.Module]:
    """The modules of the names, which are to stay whole.

    Args:
        modules: all, by name; the model itself has none.
        names: of some.

    Raises:
        CutError: the model does not have a module of that name, or does not call the module.
    """
    found = set()
    for name in names:
        require_module("whole", name, modules)
        if is_list(modules[name]):
            raise CutError(
                f"whole must hold names of modules that are called, got {name!r}, which is a "
                f"{type(modules[name]).__name__}; name the module around it, or those in it"
            )
        found.add(modules[name])
    return found


def opened_by_size(
    model: nn.Module, num_stages: int, whole: Collection[nn.Module]
) -> set[nn.Module]:
    """The model, and what in it has more than a stage's fair share of the parameters.

    Args:
        model: which.
        num_stages: how many there are to be.
        whole: modules that are not looked into.
    """
    share = _size(model) / num_stages
    opened = {model}

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child in whole:
                continue
            if is_list(child) or (_size(child) > share and can_open(child)):
                opened.add(child)
                visit(child)

    visit(model)
    return opened


def opened_by_names(
    model: nn.Module, names: Iterable[str], whole: Collection[nn.Module]
) -> set[nn.Module]:
    """The modules around those of the names, none of which is to stay whole.

    Raises:
        CutError: the model does not have a module of that name, or the module is within one that
            is to stay whole.
    """
    modules = dict(model.named_modules())
    opened = {model}
    for name in names:
        require_module("split_at", name, modules)
        parts = name.split(".")
        around = [".".join(parts[:length]) for length in range(1, len(parts))]
        for outer in around:
            if modules[outer] in whole:
                raise CutError(
                    "split_at must name modules outside of those that stay whole (whole=[...]), "
                    f"got {name!r}, which is within {outer!r}. Name the one or the other"
                )
        opened |= {modules[outer] for outer in around}
    return opened


def smaller(
    model: nn.Module, opened: Collection[nn.Module], whole: Collection[nn.Module]
) -> nn.Module | None:
    """The largest module that could be opened, and is not to stay whole; None where all are."""
    closed = [child for parent in opened for child in parent.children() if child not in opened]
    able = [module for module in closed if module not in whole and can_open(module)]
    order = {module: number for number, module in enumerate(model.modules())}
    return max(able, key=lambda module: (_size(module), -order[module]), default=None)


def alike(model: nn.Module, module: nn.Module) -> set[nn.Module]:
    """The modules of the model that are of the type of one, and the lists in them."""
    same = {other for other in model.modules() if type(other) is type(module)}
    lists = {part for other in same for part in other.modules() if is_list(part)}
    return same | lists


def is_list(module: nn.Module) -> bool:
    """Whether it is not called itself, as a list of modules is not."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Module.forward


def can_open(module: nn.Module) -> bool:
    """Whether cutting within the module loses nothing that it does."""
    return next(module.children(), None) is not None and why_whole(module) is None


def why_whole(module: nn.Module) -> str | None:
    """Why a cut of the module would lose something; None where it would not."""
    if is_list(module):
        return None
    if any(_is_strange(hook) for hooks in HOOKS for hook in getattr(module, hooks).values()):
        return "has hooks, which would not be called"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "is compiled as a whole; compile its layers instead"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted as a whole; script its layers instead"
    if type(module).__call__ is not nn.Module.__call__ and not isinstance(module, GraphModule):
        return "has a __call__ of its own"
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch compiles it, or anything in it."""
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def _is_strange(hook: object) -> bool:
    # An exported program's hooks look at its arguments, which a recording does as well.
    return not getattr(hook, "__module__", "").startswith(("torch.export", "torch._export"))


def require_openable(opened: Iterable[nn.Module], model: nn.Module) -> None:
    """Raises CutError where a module that has to be cut must stay whole."""
    for module in opened:
        reason = why_whole(module)
        if reason is not None:
            names = {module: name for name, module in model.named_modules()}
            name = names[module] or "the model"
            remedy = "Have stages begin outside of it" if names[module] else "Only layers may"
            raise CutError(f"{name} ({type(module).__name__}) {reason}. {remedy}")


def refuse_nested(module: nn.Module, name: str | None, args: Any, kwargs: Any) -> None:
    """Raises CutError where torch would make nested tensors in a call that it makes otherwise here.

    While a forward is recorded, torch takes the path for padded tensors, whose values differ.
    """
    is_fast = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    if not (is_fast and isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor):
        return
    given = signature(nn.TransformerEncoder.forward).bind(module, *args, **kwargs).arguments
    trains = torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())
    is_padded = given.get("src_key_padding_mask") is not None and given.get("mask") is None
    if is_padded and not (trains or module.layers[0].training):
        raise CutError(
            f"{name or 'the model'} (TransformerEncoder) makes nested tensors of padded batches in "
            "eval mode, which a cut within it would lose. Make it with enable_nested_tensor=False, "
            "or keep it whole (whole=[...])"
        )


def _size(module: nn.Module) -> int:
    return sum(map(num_values, module.parameters()))
