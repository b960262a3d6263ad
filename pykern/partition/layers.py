"""Places layers on the devices of their stages, and refuses layers that a pipeline cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from ..runtime.stage.layer_copies import refuse_to_copy
from ..runtime.stage.stage import Stage
from ..torch_private import HOOKS
from .balance import Partition


def refuse_hooks(model: nn.Module) -> None:
    """Raises TypeError if a model that is cut into its layers has hooks, which would not run."""
    if any([getattr(model, hooks) for hooks in HOOKS]):
        raise TypeError(
            "the model must have no hooks of its own, which would not run once it is cut, got a "
            f"{type(model).__name__} with some. Put the hooks on its layers"
        )


def refuse_inside(model: object, kind: type[nn.Module]) -> None:
    """Raises TypeError if the model, or the list of layers, has a module of the kind in it."""
    for layer in model if isinstance(model, Sequence) else [model]:
        inside = layer.named_modules() if isinstance(layer, nn.Module) else ()
        for name, module in inside:
            if isinstance(module, kind):
                raise TypeError(
                    f"the model must have a forward with a backward, got a {type(module).__name__} "
                    f"({name or 'the model'}), whose forward has no backward. Give the model that "
                    "it was made of"
                )


def refuse_foreign_devices(model: Any, device_type: str) -> None:
    """Raises ValueError if a parameter or buffer cannot be moved to the pipeline's devices.

    Args:
        model: the model, or its layers; anything else passes.
        device_type: the type of the pipeline's devices. CPU workers take only tensors on the CPU;
            a GPU ("cuda") also takes tensors on other GPUs.
    """
    for name, tensor in _named_tensors(model):
        if tensor.device.type not in ("cpu", device_type):
            whose = "CPU workers" if device_type == "cpu" else "GPUs"
            has_values = tensor.device.type != "meta"
            remedy = (
                "Move the model to the CPU"
                if has_values
                else "Give it values, by to_empty(device='cpu') and load_state_dict,"
            )
            raise ValueError(
                f"{name} must be on the CPU or on the pipeline's devices, {whose}, got "
                f"{tensor.device}. {remedy} first"
            )


def refuse_lazy(model: Any) -> None:
    """Raises ValueError if a parameter or buffer of a model, or of its layers, has no shape yet."""
    for name, tensor in _named_tensors(model):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} must have a shape, got a lazy one without. Run the model once before"
            )


def _named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, by their names in the model or with the number of their layer."""
    if isinstance(model, nn.Module | ExportedProgram):
        yield from (*model.named_parameters(), *model.named_buffers())
    for index, layer in enumerate(model if isinstance(model, Sequence) else ()):
        if isinstance(layer, nn.Module):
            yield from (*layer.named_parameters(str(index)), *layer.named_buffers(str(index)))


def place_layers(
    layers: Mapping[str, nn.Module], cut: Partition, devices: Sequence[torch.device]
) -> None:
    """Moves the layers, in place, to the devices of their stages; parameters stay the same objects.

    Modules and parameters that several stages use go to the device of the first of these stages.

    Args:
        layers: the layers by name, which `refuse_foreign_devices` has let pass.
        cut: the layers of each stage.
        devices: one device per stage.

    Raises:
        ValueError: torch is set to make new parameters when it moves a module. No layer has been
            moved.
    """
    names = list(layers)
    placed = [
        (f"layer {name!r}", layers[name], device)
        for span, device in zip(cut.stages, devices, strict=True)
        for name in names[span.start : span.stop]
    ]
    moving = [item for item in placed if any(t.device != item[2] for t in _tensors(item[1]))]
    if moving and torch.__future__.get_overwrite_module_params_on_conversion():
        raise ValueError(
            "torch.__future__.set_overwrite_module_params_on_conversion must be False to move "
            f"{moving[0][0]} to {moving[0][2]}, got True, which makes new parameters that an "
            "optimizer would not know. Set it to False, or move the layer first"
        )
    there: set[int] = set()
    for _, layer, device in placed:
        _move(layer, device, there)


def make_stages(
    layers: Sequence[nn.Module], cut: Partition, devices: Sequence[torch.device]
) -> list[Stage]:
    """The stages of layers, which are already on the devices of their stages."""
    return [
        Stage(index, layers[span.start : span.stop], device)
        for index, (span, device) in enumerate(zip(cut.stages, devices, strict=True))
    ]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _move(layer: nn.Module, device: torch.device, there: set[int]) -> None:
    """Moves the modules and parameters of a layer, except if already placed (ids in `there`)."""
    held = {id(item) for item in (*layer.modules(), *layer.parameters())}
    if any(tensor.device != device for tensor in _tensors(layer)):
        if held.isdisjoint(there):
            layer.to(device)
        else:
            for module in layer.modules():
                if id(module) not in there:
                    _move_alone(module, device, there)
    there |= held


def _move_alone(module: nn.Module, device: torch.device, there: set[int]) -> None:
    kept = [p for p in module.parameters(recurse=False) if id(p) in there]
    still = {id(tensor) for p in kept for tensor in (p, p.grad)}
    module._apply(lambda t: t if id(t) in still else t.to(device), recurse=False)


def refuse_shared(layers: Mapping[str, nn.Module], cut: Partition) -> None:
    """Raises ValueError if stages share modules that cannot be shared: see `runtime.ties`.

    These are running statistics, and parameters of layers that cannot be copied.
    """
    names = list(layers)
    by_stage = [{name: layers[name] for name in names[s.start : s.stop]} for s in cut.stages]
    _refuse_shared_statistics(by_stage)
    owned: set[Tensor] = set()
    for stage, of_stage in enumerate(by_stage):
        used = {tensor for layer in of_stage.values() for tensor in layer.parameters()}
        refuse_to_copy(
            of_stage,
            used & owned,
            f"stage {stage} would need a copy of it, because an earlier stage has a parameter of "
            "it too; cut so that they share a stage (balance=[...]), or untie them",
        )
        owned |= used


def _refuse_shared_statistics(by_stage: Sequence[Mapping[str, nn.Module]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for stage, layers in enumerate(by_stage):
        for name, layer in layers.items():
            for buffer_name, buffer in _running_statistics(layer):
                here = f"{name}.{buffer_name}"
                first, there = owner.setdefault(id(buffer), (stage, here))
                if first != stage:
                    raise ValueError(
                        f"{there} (stage {first}) and {here} (stage {stage}) must be two buffers, "
                        "got one, to which stages would write in no fixed order. Cut so that they "
                        "share a stage (balance=[...]), or give each its own"
                    )


def _running_statistics(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a forward writes; other buffers, such as masks, are taken as constant."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.named_buffers(prefix=name, recurse=False)
