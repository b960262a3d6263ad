"""Graph mode notices changes in captured layers, and names the module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pykern.runtime.gpu.capture.contents import Contents


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.buffer = nn.Buffer(torch.ones(4))
        self.edges = nn.Buffer(torch.eye(4).to_sparse())
        self.scale = 1000.5
        self.word = "a word"
        self.listed = [1]
        weight: Any = self.weight
        weight.main_grad = torch.zeros(4, 4)


def nothing(*_: object) -> None:
    pass


def of_main_grad(layer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer.weight.main_grad = change(layer.weight.main_grad)


def moved_main_grad(layer: Any) -> None:
    layer.bias.main_grad = layer.weight.main_grad
    layer.weight.main_grad = None


def set_data(layer: Any, data: torch.Tensor) -> None:
    layer.weight.data = data


CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach())),
    "data": lambda layer: set_data(layer, torch.zeros(4, 4)),
    "strides alone": lambda layer: set_data(layer, layer.weight.data.t()),
    "shape alone": lambda layer: set_data(layer, layer.weight.data[:2]),
    "dtype alone": lambda layer: setattr(layer.buffer, "data", layer.buffer.view(torch.int32)),
    "buffer": lambda layer: setattr(layer, "buffer", torch.ones(4)),
    "sparse buffer": lambda layer: setattr(layer, "edges", torch.eye(4).to_sparse()),
    "number": lambda layer: setattr(layer, "scale", 3.5),
    "type of a number": lambda layer: setattr(layer, "scale", torch.tensor(1000.5)),
    "word": lambda layer: setattr(layer, "word", "another"),
    "new attribute": lambda layer: setattr(layer, "more", 1),
    "attribute less": lambda layer: delattr(layer, "word"),
    "forward hook": lambda layer: layer.register_forward_hook(nothing),
    "hook of a tensor": lambda layer: layer.weight.register_hook(nothing),
    "late hook": lambda layer: layer.weight.register_post_accumulate_grad_hook(nothing),
    "main_grad": lambda layer: of_main_grad(layer, torch.clone),
    "main_grad's strides": lambda layer: of_main_grad(layer, torch.t),
    "main_grad's absence": lambda layer: setattr(layer.weight, "main_grad", None),
    "main_grad elsewhere": moved_main_grad,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_its_module_named(name: str) -> None:
    layers = [Layer() for _ in range(3)]
    contents = Contents([(f"layer {index}", layer) for index, layer in enumerate(layers)])
    assert contents.changed() is None
    CHANGES[name](layers[1])
    assert contents.changed() == "layer 1"


NO_CHANGES: dict[str, Callable[[Any], object]] = {
    "values": lambda layer: layer.weight.data.zero_(),
    "the same number": lambda layer: setattr(layer, "scale", float("1000.5")),
    "the same word": lambda layer: setattr(layer, "word", " ".join(["a", "word"])),
    "another view of the same place": lambda layer: of_main_grad(layer, torch.detach),
    "items of a list": lambda layer: layer.listed.append(2),
    "gradients": lambda layer: setattr(layer.weight, "grad", torch.ones(4, 4)),
}


@pytest.mark.parametrize("name", NO_CHANGES)
def test_other_changes_are_not(name: str) -> None:
    layer = Layer()
    contents = Contents([("layer", layer)])
    NO_CHANGES[name](layer)
    assert contents.changed() is None


def test_no_modules_do_not_change() -> None:
    assert Contents([]).changed() is None
