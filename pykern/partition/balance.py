"""Cuts a chain of layers into stages of nearly equal cost.

This module only decides where to cut: it does not copy, move or wrap a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from math import inf
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from ..columns import counted, in_columns
from ..plan.counts import require_counts
from ..tensors.parameters import num_values
from .bottleneck import Limit, balanced_ends, ends_for_speeds, spans_of
from .profile import bytes_held, costs_of_layers
from .unequal import StageDevices

# The measure that stages share equally, the layers of each stage, or prices by patterns of names.
Balance: TypeAlias = (
    Literal["parameters", "layers", "time", "memory"] | Sequence[int] | Mapping[str, float]
)
_MEASURED = ("time", "memory")


@dataclass(frozen=True)
class Partition:
    """Which layers form each stage, and what each stage costs.

    Attributes:
        stages: One range of layer indices per stage, in order; together they cover every layer.
        costs: One cost per stage: a number of parameters, layers or bytes, nanoseconds, or
            millionths of prices.
        parameters: One parameter count per stage.
        layer_names: One name per layer of the whole model.
        balance: The unit of a cost: "parameters", "layers", "time", "memory" or "prices".
        layer_costs: One cost per layer of the whole model.
        layer_parameters: One parameter count per layer of the whole model.
        above_bound: On devices of unequal speed, the excess of a simulated step over a bound for
            all cuts and orders, as a share of the bound; None on equal devices.
        limits: The memory of the stages' devices, if it was given, which all cuts keep.
    """

    stages: tuple[range, ...]
    costs: tuple[int, ...]
    parameters: tuple[int, ...]
    layer_names: tuple[str, ...]
    balance: str
    layer_costs: tuple[int, ...] = ()
    layer_parameters: tuple[int, ...] = ()
    above_bound: float | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def with_stages(self, stages: Sequence[range]) -> Partition:
        """The same layers in other stages."""
        return replace(
            self,
            stages=tuple(stages),
            costs=_sums(self.layer_costs, stages),
            parameters=_sums(self.layer_parameters, stages),
        )

    def __str__(self) -> str:
        """The cut as a table: stage, layers, parameters and share of the whole cost."""
        total = sum(self.costs)
        rows = [("stage", "layers", "parameters", f"share of {self.balance}")]
        for stage, (layers, parameters, cost) in enumerate(
            zip(self.stages, self.parameters, self.costs, strict=True)
        ):
            share = f"{cost / total:.1%}" if total else "-"
            rows.append((str(stage), self._describe(layers), f"{parameters:,}", share))
        table = in_columns(rows, left=1)
        if self.above_bound is None:
            return table
        return f"{table}\nat most {self.above_bound:.1%} above the best cut and order, simulated"

    def _describe(self, layers: range) -> str:
        """Layer indices and names, the middle of a long stage left out."""
        names = [self.layer_names[layer] for layer in layers]
        if len(names) > 3:
            names = [names[0], "...", names[-1]]
        first, last = layers[0], layers[-1]
        indices = str(first) if first == last else f"{first}-{last}"
        return f"{indices} {', '.join(names)}"


def partition(
    layers: nn.Sequential | Sequence[nn.Module] | Mapping[str, nn.Module],
    num_stages: int,
    balance: Balance = "parameters",
    sample: Any = None,
    speeds: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
) -> Partition:
    """Cut a chain of layers into contiguous, non-empty stages.

    The costliest stage is as cheap as any cut can make it. Among such cuts the stages are as equal
    as possible in cost, then in number of layers (least sum of squares). Among cuts that are still
    tied, the first stages are short, because they hold the most microbatches in flight.

    Args:
        layers: The model as a chain, in which each layer takes the output of the layer before; by
            name or not.
        num_stages: How many stages to make; at least 1, at most the number of layers.
        balance: The measure that stages share equally: "parameters", "layers", "time" (forward and
            backward, measured on `sample`), "memory" (bytes of weights, gradients, Adam's moments,
            and activations of as many microbatches as stages, measured on `sample`); or prices by
            patterns of layer names, as in `{"embed*": 0, "*head": 2, "*": 1}`, where the first
            match counts and a layer without a name goes by its number and its type; or a list of
            the number of layers of each stage.
        sample: An input of the first layer; only, and always, for balance "time" and "memory".
        speeds: Speed of each stage's device, in any unit. The slowest stage, by cost divided by
            speed, is then as fast as any cut can make it. Balance "memory" ignores the speeds.
            None for equal devices.
        memory: Bytes that each stage may hold, as "memory" counts them, for balance "time" and
            "memory"; None for any number. With "memory" the fullest stage, by its share of these
            bytes, is then as empty as any cut can make it.

    Returns:
        The stages with their costs; a given list reports its cost in parameters.

    Raises:
        TypeError: If `layers` is not a chain of modules, or a count or speed is not a number.
        ValueError: If there are fewer layers than stages, the balance is unknown or does not fit
            the model, a parameter has no shape yet, `sample` is missing or superfluous, or no cut
            keeps the memory.
    """
    StageDevices(speeds, memory).require(num_stages, balance)
    named = as_chain(layers)
    # A reader knows a layer by its own name, or by its type if the name is a number.
    chain = [(type(each).__name__ if name.isdigit() else name, each) for name, each in named]
    require_num_stages(num_stages, len(chain))
    parameters = [_count_parameters(name, layer) for name, layer in chain]
    limits: tuple[Limit, ...] = ()
    if isinstance(balance, Mapping):
        costs = [
            _price(balance, name, kind) for (name, _), (kind, _) in zip(named, chain, strict=True)
        ]
        if not any(costs):
            raise ValueError(
                f"balance must give a layer a price above 0, got {dict(balance)}. Capitals count "
                f"in patterns: the layers are {', '.join(sorted({kind for kind, _ in chain}))}"
            )
        ends = _ends(costs, num_stages, speeds)
    elif isinstance(balance, Sequence) and not isinstance(balance, str):
        costs = parameters
        ends = _given_ends(balance, num_stages, len(chain))
    else:
        _check_sample(balance, sample)
        layers_of = [layer for _, layer in chain]
        costs = costs_of_layers(balance, layers_of, parameters, sample, num_stages)
        if memory is not None:
            held = costs if balance == "memory" else bytes_held(layers_of, sample, num_stages)
            limits = (_limit(held, memory),)
        ends = _ends(costs, num_stages, memory if balance == "memory" else speeds, limits)
    stages = spans_of(ends)
    return Partition(
        stages=stages,
        costs=_sums(costs, stages),
        parameters=_sums(parameters, stages),
        layer_names=tuple(name for name, _ in chain),
        balance=_counted(balance),
        layer_costs=tuple(costs),
        layer_parameters=tuple(parameters),
        limits=limits,
    )


def _limit(held: Sequence[int], memory: Sequence[float]) -> Limit:
    total = [0, *accumulate(held)]
    return Limit(total, [int(min(of_stage, total[-1])) for of_stage in memory])


def _sums(of_layers: Sequence[int], stages: Sequence[range]) -> tuple[int, ...]:
    return tuple(sum(of_layers[layer] for layer in stage) for stage in stages)


def _ends(
    costs: Sequence[int],
    num_stages: int,
    speeds: Sequence[float] | None,
    limits: Sequence[Limit] = (),
) -> list[int]:
    """The ends of stages of equal cost, or of equal time on devices of unequal speed."""
    if speeds is None or len(set(speeds)) == 1:
        ends = balanced_ends(costs, num_stages)
        if all(limit.kept_by(spans_of(ends)) for limit in limits):
            return ends
        speeds = [1.0] * num_stages
    return ends_for_speeds(costs, speeds, limits)


def as_chain(
    layers: nn.Sequential | Sequence[nn.Module] | Mapping[str, nn.Module],
) -> list[tuple[str, nn.Module]]:
    """Each layer with its name, or number.

    Raises:
        TypeError: the layers are not a sequence or mapping of modules.
    """
    if isinstance(layers, Mapping):
        named = list(layers.items())
    elif isinstance(layers, nn.Sequential):
        # `named_children` would leave out a layer that occurs twice.
        named = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
    elif isinstance(layers, Sequence | nn.ModuleList):
        named = [(str(index), layer) for index, layer in enumerate(layers)]
    else:
        raise TypeError(
            "layers must be an nn.Sequential or a list of modules, one per layer, got "
            f"{type(layers).__name__}"
        )
    for name, layer in named:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name} must be an nn.Module, got {type(layer).__name__}")
    return named


def require_num_stages(num_stages: int, num_layers: int) -> None:
    """Refuses more stages than layers.

    Raises:
        TypeError, ValueError: the model has too few layers, or the number of stages is wrong.
    """
    require_counts(num_stages=num_stages)
    if num_layers < num_stages:
        raise ValueError(
            f"the model must have at least {counted(num_stages, 'layer')}, one for each stage, "
            f"got {num_layers}. Split the model into more layers, or use fewer devices, chunks or "
            "waves"
        )


def _count_parameters(name: str, layer: nn.Module) -> int:
    parameters = list(layer.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise ValueError(
            f"layer {name} must have no lazy parameters, got some. Run the model once before"
        )
    return sum(map(num_values, parameters))


def _counted(balance: Balance) -> str:
    if isinstance(balance, str):
        return balance
    return "prices" if isinstance(balance, Mapping) else "parameters"


def _check_sample(balance: str, sample: Any) -> None:
    if balance not in ("parameters", "layers", *_MEASURED):
        raise ValueError(
            "balance must be 'parameters', 'layers', 'time', 'memory', a list of layer counts, or "
            f"a dict of prices by layer name, got {balance!r}"
        )
    if (balance in _MEASURED) != (sample is not None):
        raise ValueError(
            "sample must be given for, and only for, balance 'time' and 'memory', got "
            f"balance={balance!r} {'without' if sample is None else 'with'} sample"
        )


def _price(prices: Mapping[str, float], name: str, kind: str) -> int:
    """The cost of a layer in millionths; `name` may be a number, and `kind` is then its type."""
    for pattern, price in prices.items():
        if any(fnmatchcase(each, str(pattern)) for each in (name, kind)):
            if not isinstance(price, int | float) or not 0 <= price < inf:
                raise ValueError(f"balance must hold prices >= 0, got {price!r} for {pattern!r}")
            return round(price * 1_000_000)
    layer = repr(name) if name == kind else f"{name!r} ({kind})"
    raise ValueError(
        f"balance must have a price for each layer, got none for {layer}: patterns "
        f"{', '.join(map(repr, prices))} do not match. Add the pattern '*' for the rest"
    )


def _given_ends(counts: Sequence[int], num_stages: int, num_layers: int) -> list[int]:
    for count in counts:
        if type(count) is not int:
            raise TypeError(f"each count of balance must be an int, got {count!r}")
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"balance must hold {num_stages} counts of at least 1, one per stage, that sum to "
            f"{num_layers}, the number of layers, got {list(counts)}"
        )
    return list(accumulate(counts))
