"""The sharded modules of a model, given by styles as for torch's `parallelize_module`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from ...trace import CutError
from .even import refuse_uneven

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

# Styles by module name; each part of the name between dots may have wildcards.
Styles: TypeAlias = "Mapping[str, ParallelStyle]"

# Modules in this package hold parameters for fused operations, which read them directly.
_FUSED = "pykern.models."


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module that is sharded.

    Attributes:
        name: the module's name in the user's model.
        module: the module itself.
        style: the style by which the module is sharded.
        stage: the only stage that runs the module.
    """

    name: str
    module: nn.Module
    style: Any
    stage: int


def find_shards(
    model: nn.Module,
    stages: Sequence[Sequence[nn.Module]],
    styles: Styles,
    num_processes: int,
) -> list[ShardedModule]:
    """The modules that match the styles, in the order of the styles, then of the model.

    Args:
        model: the model, with the user's names.
        stages: the layers of each stage.
        styles: the styles, by pattern.
        num_processes: the number of processes that have shards.

    Raises:
        TypeError: a value is not a ParallelStyle, or its style does not support the module.
        ValueError: a pattern matches nothing, a parameter is used in several places, or features
            are handed on in shards of unequal sizes.
        CutError: the stages are cut within a module that has a style.
    """
    _require_styles(styles)
    stages_of: dict[nn.Module, set[int]] = {}
    for number, layers in enumerate(stages):
        for module in {module for layer in layers for module in layer.modules()}:
            stages_of.setdefault(module, set()).add(number)
    uses: Counter[Tensor] = Counter(
        parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    found = []
    for pattern, style in styles.items():
        matched: dict[nn.Module, str] = {}
        for name, module in _matching(model, pattern.split(".")):
            matched.setdefault(module, name)
        if not matched:
            raise ValueError(
                f"tensor_parallel must have styles for modules of the model, got {pattern!r}. "
                f"Modules are {_some_names(model)}"
            )
        for module, name in matched.items():
            (stage,) = _require_one_stage(name, stages_of.get(module, set()))
            _require_sliceable(model, name, style)
            _require_untied(name, module, uses)
            refuse_uneven(name, module, style, num_processes)
            found.append(ShardedModule(name, module, style, stage))
    return found


def _require_styles(styles: object) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle  # noqa: PLC0415 - see above

    if not isinstance(styles, Mapping) or not styles:
        raise TypeError(
            "tensor_parallel must be (mesh, styles), with styles a dict from names of modules to "
            f"ParallelStyle, as parallelize_module takes it, got {styles!r}"
        )
    for name, style in styles.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"tensor_parallel must have a ParallelStyle for each name, got {style!r} for "
                f"{name!r}"
            )
        if not name:
            raise ValueError(
                "tensor_parallel must have styles for modules in the model, got one for the model "
                "itself, which is cut"
            )


def _matching(
    module: nn.Module, tokens: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    token, *others = tokens
    for child_name, child in module._modules.items():
        if child is not None and fnmatch(child_name, token):
            name = f"{prefix}{child_name}"
            if others:
                yield from _matching(child, others, f"{name}.")
            else:
                yield name, child


def _some_names(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if name and module._parameters]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _require_one_stage(name: str, stages: set[int]) -> set[int]:
    if not stages:
        raise CutError(
            f"tensor_parallel must have styles for modules within one stage, got one for {name}, "
            "within which the model is cut. Have stages begin elsewhere (split_at=[...]), or give "
            "styles to the modules in it"
        )
    if len(stages) > 1:
        raise ValueError(
            f"{name} must be used in one stage to have a style of tensor_parallel, got stages "
            f"{', '.join(map(str, sorted(stages)))}, whose devices have different groups. Cut so "
            "that they share a stage (balance=[...])"
        )
    return stages


def _require_sliceable(model: nn.Module, name: str, style: Any) -> None:
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - see above
        ColwiseParallel,
        RowwiseParallel,
    )

    module = model.get_submodule(name)
    linear = isinstance(module, nn.Linear | nn.Embedding)
    if type(style) in (ColwiseParallel, RowwiseParallel) and not linear:
        raise TypeError(
            f"{name} must be an nn.Linear or nn.Embedding for {type(style).__name__}, got a "
            f"{type(module).__name__}"
        )
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in range(1, len(parts) + 1)]
    for outer in around:
        if type(outer).__module__.startswith(_FUSED):
            raise TypeError(
                f"{name} must call torch's operations to be sharded, got a {type(outer).__name__} "
                "of pykern.models, whose fused operations take whole tensors. Use modules that "
                "call torch's"
            )


def _require_untied(name: str, module: nn.Module, uses: Counter[Tensor]) -> None:
    for inner, parameter in module.named_parameters():
        if uses[parameter] > 1:
            raise ValueError(
                f"{name}.{inner} must be used once to be sharded, got {uses[parameter]} uses, "
                "which sharding would untie. Untie them, or leave the module whole"
            )
