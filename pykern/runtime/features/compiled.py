"""Stages that torch compiles, each as one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..stage.stage import Stage
from .feature import Feature, Made

BACKEND = "inductor"


class CompiledStages(Feature):
    """Has each stage call its layers as one function, which torch compiles when it first runs."""

    def attach(self, made: Made) -> None:
        """Replaces the layers of each stage by one compiled layer."""
        # torch 2.11 crashes if the thread that compiled first has ended, as a worker may have.
        torch.compile(torch.sin, backend="eager")(torch.zeros(()))
        for stage in made.executor.stages:
            stage.originals = stage.layers = [CompiledStage(stage)]
            stage.keywords_of = [frozenset[str]().union(*stage.keywords_of)]


class CompiledStage(nn.Module):
    """The layers of a stage, called one after another by a function that torch compiles."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        for number, layer in enumerate(stage.layers):
            self.add_module(str(number), layer)
        call = _calling(stage.layers, stage.keywords_of)
        # torch counts compilations by code object, and gives up after a few: each stage has a code
        # object of its own.
        code = call.__code__.replace(co_name=f"stage_{stage.index}")
        own = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        self._compiled_call_impl = torch.compile(own, backend=BACKEND)


def _calling(layers: Sequence[nn.Module], keywords_of: Sequence[frozenset[str]]) -> FunctionType:
    """A function that calls the layers, each with the keyword arguments that its forward names."""
    first, *others = zip(layers, keywords_of, strict=True)

    def call(*arguments: Any, **named: Any) -> Any:
        layer, names = first
        value = layer(*arguments, **_only(named, names))
        for layer, names in others:
            value = layer(value, **_only(named, names))
        return value

    assert isinstance(call, FunctionType)
    return call


def _only(named: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name in names}


def refuse_ties(layers: Mapping[str, nn.Module], stages: Sequence[range]) -> None:
    """Raises ValueError if compiled stages share a parameter, since one would run with a copy.

    Args:
        layers: of the model, by name.
        stages: the numbers of each stage's layers.
    """
    owner: dict[int, int] = {}
    named = list(layers.items())
    for stage, span in enumerate(stages):
        for layer_name, layer in named[span.start : span.stop]:
            for name, parameter in layer.named_parameters(prefix=layer_name):
                first = owner.setdefault(id(parameter), stage)
                if first != stage:
                    raise ValueError(
                        "compile must be False where stages share a parameter, got 'stages' and "
                        f"{name} in stages {first} and {stage}: one of them runs with copies of "
                        "its layers. Compile layers without it (layer.compile()), or have both in "
                        "one stage"
                    )
