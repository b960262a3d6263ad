"""Structures that pass between modules, into a model and out of it, beside tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import WIDTH, Case, linears, mean_square, vectors


class Dicts(nn.Module):
    """A layer that takes a dict and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, Any]) -> dict[str, Any]:
        y = self.linear(parts["x"]) * parts["scale"]
        return {"x": torch.where(parts["keep"], y, parts["x"]), "keep": y > 0, "scale": 0.75}


class DictNet(nn.Module):
    """Dicts in, between and out; one of them within another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dicts() for _ in range(8))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        parts: dict[str, Any] = {"x": batch["x"], "keep": batch["keep"], "scale": 2}
        for layer in self.layers:
            parts = layer(parts)
        return {"out": parts, "sum": {"all": parts["x"].sum(-1)}}


@dataclass
class State:
    """The value that passes, with the number of layers it has passed."""

    x: Tensor
    gate: Tensor | None
    depth: int = 0


class StateLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        x = torch.tanh(self.linear(state.x)) / (1 + state.depth)
        gate = torch.sigmoid(x) if state.gate is None else state.gate * x
        return State(x, gate, state.depth + 1)


class DataclassNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StateLayer() for _ in range(8))

    def forward(self, x: Tensor) -> State:
        state = State(x, None)
        for layer in self.layers:
            state = layer(state)
        return state


class Pair(NamedTuple):
    """Two by name."""

    left: Tensor
    right: Tensor


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return Pair(torch.relu(self.left(pair.right)), pair.left + self.right(pair.left))


class NamedTupleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cross() for _ in range(4))

    def forward(self, left: Tensor, right: Tensor) -> Pair:
        pair = Pair(left, right)
        for layer in self.layers:
            pair = layer(pair)
        return Pair(right=pair.left, left=pair.right)


class Counted(nn.Module):
    """Takes and returns None, numbers and texts beside a tensor."""

    def __init__(self, *, has_aux: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.has_aux = has_aux

    def forward(
        self, x: Tensor, aux: Tensor | None, count: int, name: str, *, scale: float = 1.0
    ) -> tuple[Tensor, Tensor | None, int, str]:
        x = torch.tanh(self.linear(x)) * scale
        if aux is not None:
            x = x + aux
        return x, x.cos() if self.has_aux else None, count + 1, f"{name}."


class NoneNet(nn.Module):
    """Returns more than tensors as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(has_aux=number % 3 == 1) for number in range(8))

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, None, int, str]:
        aux, count, name = None, 0, "x"
        for layer in self.layers:
            x, aux, count, name = layer(x, aux, count, name, scale=scale + count)
        return x, None, count, name


class ManyInOut(nn.Module):
    """Three inputs, of which one is needed early, one late and one throughout; three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)

    def forward(self, early: Tensor, late: Tensor, all_: Tensor) -> list[Tensor]:
        x, kept = early, []
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) * all_)
            if number == 2:
                kept.append(x)
        return [*kept, x + late, all_]


def _many_loss(output: list[Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output[0], target[0]) + F.l1_loss(output[1] * output[2], target[1])


class SeveralLosses(nn.Module):
    """Computes two losses itself, of one of which layers in the middle are the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(7)
        self.side = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, labels: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        for layer in self.layers[:4]:
            x = torch.relu(layer(x))
        side = F.cross_entropy(self.side(x), labels)
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x))
        return {"side": side, "main": F.mse_loss(x, wanted)}


def _dict_net() -> Case:
    batch = {"x": vectors(), "keep": vectors() > 0}
    return Case(
        DictNet(),
        (batch,),
        lambda output, target: F.mse_loss(output["out"]["x"], target) + output["sum"]["all"].mean(),
        vectors(),
    )


def _state_loss(state: State, target: Tensor) -> Tensor:
    assert state.gate is not None
    return F.mse_loss(state.x + state.gate, target) * state.depth


def _several_losses() -> Case:
    named = {"labels": (vectors(1)[:, 0] > 0).long(), "wanted": vectors()}
    loss = lambda output: output["main"] + 0.3 * output["side"]  # noqa: E731
    return Case(SeveralLosses(), (vectors(),), loss, kwargs=named)


CASES: dict[str, Callable[[], Case]] = {
    "dicts": _dict_net,
    "dataclass": lambda: Case(DataclassNet(), (vectors(),), _state_loss, vectors()),
    "named_tuple": lambda: Case(
        NamedTupleNet(),
        (vectors(), vectors()),
        lambda pair: mean_square(pair.left) - pair.right.mean(),
    ),
    "none_and_numbers": lambda: Case(
        NoneNet(), (vectors(), 0.5), lambda output: mean_square(output[0]) * output[2]
    ),
    "many_in_and_out": lambda: Case(
        ManyInOut(), (vectors(), vectors(), vectors()), _many_loss, (vectors(), vectors())
    ),
    "several_losses": _several_losses,
}
