"""The layers of a model by name, and which of them a pipeline cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .partition import Partition

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def named_layers(model: nn.Sequential | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The layers under the names that the model gives them, or numbered.

    Raises:
        TypeError: the model is no chain of modules, or cutting would lose what it does itself.
    """
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"{type(model).__name__} has a forward of its own, which cutting would lose; give "
                "its layers as an nn.Sequential or a list"
            )
        if any(getattr(model, hooks) for hooks in _HOOKS):
            raise TypeError(
                f"the {type(model).__name__} has hooks of its own, which cutting would lose; put "
                "them on its layers"
            )
        # Not named_children, which leaves out a layer that occurs twice.
        return {name: layer for name, layer in model._modules.items() if layer is not None}
    if not isinstance(model, Sequence | nn.ModuleList):
        raise TypeError(
            f"cannot cut a {type(model).__name__}: give an nn.Sequential or a list of modules"
        )
    layers = {str(index): layer for index, layer in enumerate(model)}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name} is a {type(layer).__name__}, not an nn.Module")
    return layers


def refuse_foreign_devices(layers: Mapping[str, nn.Module], device_type: str) -> None:
    """Raises ValueError where the pipeline's devices cannot have a parameter or buffer.

    Args:
        layers: the layers by name.
        device_type: of the pipeline's devices. CPU workers take what is on the CPU; to a GPU
            ("cuda") it can be moved from there and from other GPUs.
    """
    for name, layer in layers.items():
        for tensor_name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.device.type not in ("cpu", device_type):
                whose = "CPU workers" if device_type == "cpu" else "GPUs"
                raise ValueError(
                    f"{name}.{tensor_name} is on {tensor.device}, but the pipeline's devices "
                    f"are {whose}; move the model to the CPU first"
                )


def place_layers(
    layers: Mapping[str, nn.Module], cut: Partition, devices: Sequence[torch.device]
) -> None:
    """Moves the layers, in place, to the devices of their stages; parameters stay the same objects.

    Args:
        layers: the layers by name, which `refuse_foreign_devices` has let pass.
        cut: which of them form each stage.
        devices: one per stage.

    Raises:
        ValueError: a module occurs in stages on different devices, or torch is set to make new
            parameters where it moves a module. No layer has been moved.
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
            "torch.__future__.set_overwrite_module_params_on_conversion(True) makes new parameters "
            f"of those that are moved, which an optimizer would not know: {moving[0][0]} has to be "
            f"moved to {moving[0][2]}; set it to False, or move the layer first"
        )
    _refuse_two_places(placed)
    for _, layer, device in moving:
        layer.to(device)


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _refuse_two_places(placed: Sequence[tuple[str, nn.Module, torch.device]]) -> None:
    owner: dict[nn.Module, tuple[str, torch.device]] = {}
    for name, layer, device in placed:
        for module in layer.modules():
            there, first = owner.setdefault(module, (name, device))
            holds = next(_tensors(module, recurse=False), None) is not None
            if holds and first != device:
                raise ValueError(
                    f"{there} on {first} and {name} on {device} contain the same "
                    f"{type(module).__name__}, whose buffers cannot be in both places: give each "
                    "its own copy, or cut so that they share a stage (balance=[...])"
                )


def _written_in_training(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and running statistics. Other buffers, such as masks, are taken to be constant."""
    yield from layer.named_parameters()
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.named_buffers(prefix=name, recurse=False)


def refuse_shared_tensors(layers: Mapping[str, nn.Module], cut: Partition) -> None:
    """Raises ValueError where two stages have a tensor in common that a step writes.

    Two workers would write it, in no fixed order.
    """
    names = list(layers)
    owner: dict[int, tuple[int, str]] = {}
    for stage, span in enumerate(cut.stages):
        for name in names[span.start : span.stop]:
            for tensor_name, tensor in _written_in_training(layers[name]):
                here = f"{name}.{tensor_name}"
                first, there = owner.setdefault(id(tensor), (stage, here))
                if first != stage:
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise ValueError(
                        f"{there} (stage {first}) and {here} (stage {stage}) are one {kind}; "
                        f"{kind}s shared between stages are not supported yet: cut so that they "
                        "share a stage (balance=[...]), or untie them"
                    )
