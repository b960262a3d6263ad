"""Layers, hooks and state that a model gets or loses while a pipeline runs the model."""

from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern


def _append(model: nn.Sequential, _: nn.Module) -> None:
    model.append(nn.ReLU())


def _insert(model: nn.Sequential, _: nn.Module) -> None:
    model.insert(0, nn.ReLU())


def _assign(model: nn.Sequential, _: nn.Module) -> None:
    model[1] = nn.Linear(2, 2)


def _delete(model: nn.Sequential, _: nn.Module) -> None:
    del model[1]


def _add_here(_: nn.Sequential, pipe: nn.Module) -> None:
    pipe.add_module("more", nn.ReLU())


def _assign_here(_: nn.Sequential, pipe: nn.Module) -> None:
    setattr(pipe, "1", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_append, "3"),
        (_insert, "0"),
        (_assign, "1"),
        (_delete, "1"),
        (_add_here, "more"),
        (_assign_here, "1"),
    ],
)
def test_a_layer_that_the_model_has_got_or_lost_is_named(change: Any, name: str) -> None:
    """The stages would go on with those that the model had."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    x = torch.ones(4, 2)
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=x)
        change(model, pipe)
        for call in (lambda: pipe.step(x, target=x), lambda: pipe(x), lambda: pipe.stream([x])):
            with pytest.raises(RuntimeError, match=f"layer '{name}' was replaced, added or"):
                call()


def test_hooks_that_the_model_gets_afterwards_are_refused_as_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2) as pipe:
        handle = model.register_forward_hook(lambda *_: None)
        with pytest.raises(
            TypeError,
            match="the model must have no hooks of its own, which would not run once it is cut, "
            "got a Sequential with some",
        ):
            pipe(torch.ones(4, 2))
        handle.remove()
        pipe(torch.ones(4, 2))


def test_a_chain_with_a_forward_set_on_the_object_runs_it() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = lambda x: model[1](model[0](x)) * 2
    x = torch.ones(4, 2)
    with pytest.raises(TypeError, match="sample must be given to cut a"):
        pykern.Pipeline(model, devices="cpu:2", microbatches=2)
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=x[:2]) as pipe:
        assert torch.equal(pipe(x), model(x))


class Versioned(nn.Module):
    """Its state is at version 3: until 2 the weight was called `w`."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.note = "new"

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        if (local.get("version") or 1) < 3 and prefix + "w" in state:
            state[prefix + "weight"] = state.pop(prefix + "w")
        super()._load_from_state_dict(state, prefix, local, *rest)


class VersionedModel(Versioned):
    """As a whole, and in its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Versioned(), Versioned()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).exp()) * self.weight


class VersionedChain(nn.Sequential):
    _version = 5

    def __init__(self) -> None:
        super().__init__(Versioned(), nn.BatchNorm1d(2), Versioned())
        self.register_buffer("count", torch.zeros(1))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [VersionedModel, VersionedChain])
def test_the_state_has_the_versions_of_the_model(make: type[nn.Module], inside: bool) -> None:
    model = make()
    expected: Any = (nn.ModuleDict({"net": model}) if inside else model).state_dict()
    sample = torch.ones(2, 2) if make is VersionedModel else None
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=sample) as pipe:
        whole = nn.ModuleDict({"net": pipe}) if inside else pipe
        found: Any = whole.state_dict()
        assert list(found) == list(expected)
        assert found._metadata == expected._metadata
        # A file of an older version.
        old = type(expected)((key.replace("weight", "w"), value) for key, value in found.items())
        old._metadata = {key: {"version": 1} for key in found._metadata}
        if make is VersionedChain:
            batch_norm = "net.1" if inside else "1"
            old[f"{batch_norm}.weight"] = old.pop(f"{batch_norm}.w")
            del old[f"{batch_norm}.num_batches_tracked"]
        for key in old:
            if key.endswith("w"):
                old[key] = torch.full((2,), 7.0)
            elif key.endswith("_extra_state"):
                old[key] = "old"
        whole.load_state_dict(old)
    versioned = [module for module in model.modules() if isinstance(module, Versioned)]
    assert all(module.note == "old" for module in versioned)
    assert all(torch.equal(module.weight, torch.full((2,), 7.0)) for module in versioned)


def test_hooks_of_the_state_are_called_once_wherever_they_were_registered() -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2) as pipe:
        for name, module in (("model", model), ("pipe", pipe)):
            module.register_state_dict_pre_hook(lambda *_, name=name: calls.append(name))
            module.register_load_state_dict_post_hook(lambda *_, name=name: calls.append(name))
        pipe.load_state_dict(pipe.state_dict())
    assert calls == ["model", "pipe"] * 2


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


@pytest.mark.parametrize("form", ["sequential", "list", "own forward"])
def test_a_loss_that_is_a_module_is_not_one_of_the_model(form: str) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model: Any = {"sequential": nn.Sequential(*layers), "list": layers, "own forward": Own()}[form]
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    sample = x[:2] if form == "own forward" else None
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, loss_fn=nn.MSELoss(), sample=sample
    ) as pipe:
        found = pipe.step(x, target=y)
        torch.testing.assert_close(found, F.mse_loss(pipe(x), y))
        assert len(list(pipe.children())) == 2


class FrozenNorm(nn.Sequential):
    """A model that keeps the running statistics of a pretrained norm."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self[1].eval()
        return self


class OwnForward(FrozenNorm):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[2](self[1](self[0](x)))
        return y if self.training else -y


@pytest.mark.parametrize("kind", [FrozenNorm, OwnForward])
def test_the_mode_is_that_of_the_model_whoever_sets_it(kind: type[FrozenNorm]) -> None:
    """After `model.eval()` the pipeline told that it trained, and `pipe.train()` trained norms that
    the model's own `train` keeps in eval mode."""
    model = kind(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    x = torch.randn(4, 2)
    sample = x[:2] if kind is OwnForward else None
    with pykern.Pipeline(model.train(), devices="cpu:2", microbatches=2, sample=sample) as pipe:
        for one, mode in ((model, False), (pipe, True), (pipe, False), (model, True)):
            one.train(mode)
            assert (model.training, pipe.training) == (mode, mode)
            assert [layer.training for layer in pipe.children()] == [mode, False, mode]
            torch.testing.assert_close(pipe(x), model(x))
        pipe.training = False
        assert not model.training


def test_the_mode_of_a_list_of_layers_is_that_of_the_pipeline() -> None:
    layers = [nn.Linear(2, 2), nn.Dropout(0.5)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        assert pipe.training
        pipe.eval()
        assert not pipe.training
        assert not any(layer.training for layer in layers)
        pipe.train()
        assert pipe.training
        assert all(layer.training for layer in layers)
