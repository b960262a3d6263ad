"""Reasons against capturing a training step, and the signature of a captured step."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....plan import Kind, Plan
from ....tensors.trees import all_tensors, flatten
from ....torch_private import HOOKS, has_live_graph
from ....torch_private.bare_calls import has_any_global_hook
from ....trace import Environment
from ....trace.cut_tape import CutTape
from ...batch import Batch
from ...caller_state import CallerState
from ...loss import Losses
from ...stage.stage import Stage

# Types whose values cannot change. Other objects in a batch may change in place.
_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class CannotCapture(RuntimeError):
    """A step cannot be captured; the message names the cause."""


def refuse_plan(plan: Plan) -> None:
    """Raises CannotCapture if the plan cannot be captured."""
    if plan.placement.num_replicas > 1:
        raise CannotCapture("a plan with several replicas cannot be captured: their layers change")
    if not (plan.has(Kind.B) or plan.has(Kind.I)):
        raise CannotCapture("a plan without backward cannot be captured")


def refuse_stage(stage: Stage) -> None:
    """Raises CannotCapture if replays of the stage would differ from calls of its layers.

    Args:
        stage: has run a step already.
    """
    draws = stage.draws
    # Seeds of kernels can come from memory that changes.
    if draws.possible and not (draws.only_seeds and draws.num_seeds > 0):
        raise CannotCapture(
            f"{_drawing(stage)} draws random numbers, which would be the same in every replay"
        )
    if stage.layers is not stage.originals:
        raise CannotCapture(
            f"stage {stage.index} uses what an earlier stage uses as well, and has other copies of "
            "it in each step"
        )
    if has_any_global_hook():
        raise CannotCapture("hooks of all modules are set, which a replay would not call")
    for name, module in modules_of(stage):
        _refuse_hooks(name, module)
        if getattr(module, "sparse", None) is True:
            raise CannotCapture(f"{name} has sparse gradients, which graphs do not collect")


def held_graph(stages: Sequence[Stage]) -> CannotCapture | None:
    """The error that names a parameter in a graph of autograd that something still holds, if any.

    A parameter has one node that adds up its gradient, as long as any graph holds the node. It runs
    on the stream of its first graph, which is not the stream of a capture.
    """
    if _held(stages) is None:
        return None
    # Graphs that are held in a circle are let go of here.
    gc.collect()
    name = _held(stages)
    if name is None:
        return None
    return CannotCapture(
        f"{name} is in a graph that is still held: by a loss or an output that was kept, say, or "
        "by a wrapper such as DistributedDataParallel. Let go of it before the second step"
    )


def _held(stages: Sequence[Stage]) -> str | None:
    for name, module in (named for stage in stages for named in modules_of(stage)):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and has_live_graph(parameter):
                return f"{parameter_name} of {name}"
    return None


def refuse_batch(batch: Batch) -> None:
    """Raises CannotCapture if replays would treat the batch differently from a call."""
    if any(call is not None and call[1] for call in batch.calls):
        raise CannotCapture("layers are given keyword arguments, which replays would not renew")
    if len(set(_forms(batch))) > 1:
        raise CannotCapture(
            "what the model's forward does with the microbatches of one batch differs"
        )
    for leaf in flatten((batch.inputs, batch.target))[0]:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise CannotCapture(
                    f"a tensor of the batch, of shape {tuple(leaf.shape)}, requires grad, and "
                    "replays compute none for the batch"
                )
            if leaf.layout is not torch.strided:
                raise CannotCapture(
                    f"a tensor of the batch, of shape {tuple(leaf.shape)}, has layout "
                    f"{leaf.layout}; replays read dense tensors"
                )
        elif not isinstance(leaf, _VALUES):
            raise CannotCapture(
                f"the batch holds a {type(leaf).__name__}, which may change without being seen"
            )


def modules_of_loss(batch: Batch) -> list[tuple[str, nn.Module]]:
    """The modules of the loss, with their names; empty for a loss that is not a module."""
    loss = batch.finish.function if isinstance(batch.finish, Losses) else None
    if not isinstance(loss, nn.Module):
        return []
    return _named_modules(loss, "the loss")


def refuse_loss(batch: Batch) -> None:
    """Raises CannotCapture if replays of the loss would differ from calls."""
    for name, module in modules_of_loss(batch):
        _refuse_hooks(name, module)


def _refuse_hooks(name: str, module: nn.Module) -> None:
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise CannotCapture(f"{name} has hooks, which a replay would not call")
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CannotCapture(
                f"{parameter_name} of {name} has hooks, which a replay would not call"
            )


def named(error: BaseException, stage: Stage) -> str:
    """The innermost module of the stage that an exception came through, or the stage."""
    names = {id(module): name for name, module in modules_of(stage)}
    found = f"stage {stage.index}"
    traceback = error.__traceback__
    while traceback is not None:
        found = names.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def signature(batch: Batch, stages: Sequence[Stage]) -> tuple[Any, ...] | None:
    """The values that must be equal to replay the same graphs; None if no graph can serve.

    The signature has the shapes and types of the batch, its other values, its microbatch sizes, the
    caller's modes, and the settings of all layers.
    """
    caller = CallerState(1)
    hooks = (caller.saved_tensors_hooks, caller.saved_tensors_disabled)
    if len(set(batch.rows)) > 1 or caller.inference or any(hook is not None for hook in hooks):
        return None
    if caller.function_modes or caller.dispatch_modes:
        return None
    leaves, spec = flatten((batch.inputs, batch.target))
    described = (*map(_described, leaves), getattr(batch.finish, "scale", None) is not None)
    settings = tuple(stage.settings for stage in stages)
    modes = tuple(caller.autocast), caller.autocast_dtypes, bool(has_any_global_hook())
    forms = _forms(batch)
    return described, spec, tuple(batch.rows), modes, forms, settings


def _forms(batch: Batch) -> tuple[CutTape | None, ...]:
    """By microbatch, the recorded forward that runs it; None without one."""
    first = (call[0][0] for call in batch.calls if call is not None and call[0])
    return tuple(one.cut_tape if isinstance(one, Environment) else None for one in first)


def _described(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.layout, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, _VALUES) else None


def shapes(batch: Batch) -> str:
    """The batch's shapes, for a message."""
    tensors = all_tensors((batch.inputs, batch.target))
    texts = [str(tuple(tensor.shape)) for tensor in tensors]
    return f"{', '.join(texts)} in microbatches of {', '.join(map(str, sorted(set(batch.rows))))}"


def modules_of(stage: Stage) -> list[tuple[str, nn.Module]]:
    """The modules of a stage, with their names for messages."""
    return [
        named_module
        for index, layer in enumerate(stage.originals)
        for named_module in _named_modules(layer, f"layer {index} of stage {stage.index}")
    ]


def _named_modules(root: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    return [
        (f"{type(module).__name__} ({f'{name} in {where}' if name else where})", module)
        for name, module in root.named_modules()
    ]


def _drawing(stage: Stage) -> str:
    """The name of the module that probably draws, judged by its attributes."""
    for name, module in modules_of(stage):
        rates = (getattr(module, attribute, None) for attribute in ("p", "dropout"))
        if module.training and any(isinstance(rate, float) and rate > 0 for rate in rates):
            return name
    return f"stage {stage.index}"
