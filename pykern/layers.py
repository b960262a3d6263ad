"""The layers of a model by name, and which of them a pipeline cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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


def refuse_foreign_devices(layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a parameter or buffer is not on the CPU."""
    for name, layer in layers.items():
        for parameter_name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}.{parameter_name} is on {tensor.device}, but the pipeline's devices "
                    "are CPU workers; move the model to the CPU first"
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
