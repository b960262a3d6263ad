"""Models that cannot be cut are refused before anything runs, with the line of the model and the
reason."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pykern
from pykern.trace import CutError
from tests.support.pipelines import small

from .case import WIDTH, linears


class Base(nn.Module):
    """Some layers, in front of and behind which a forward does what it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x / x.abs().max().item()  # here


class Branch(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.mean() > 0:  # here
            x = -x
        return self.run(x)


class ToList(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        shares = x.softmax(-1).mean(0).tolist()  # here
        return x * shares[0]


class Loop(Base):
    """How long it loops depends on what has been computed."""

    def forward(self, x: Tensor) -> Tensor:
        while bool((x.norm() > 1).all()):
            x = self.layers[1](x) / 2
            if not torch.isfinite(x).all():  # here
                break
        return self.run(x)


class Numpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x * float(x.detach().numpy().max())  # here


class Cache:
    """Keeps what layers leave in it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = self.linear(x)
        cache.kept.append(x)
        return x


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(4))
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cache)  # here
        return x


class Checkpointed(Base):
    """Around several layers."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


class Hides(nn.Linear):
    """Leaves something that trains where nobody sees it."""

    hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.hidden = y.sin()
        return y


class Finds(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hides = Hides(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.hides(x))
        return x + self.hides.hidden  # here


class Leaves(Base):
    """Leaves its result in itself."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.run(x)
        return self.last


class Writes(Base):
    """Writes into what an earlier stage has made, and uses a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        half = total[:, :4]
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total += x  # here
        return torch.cat([total, half], 1)


def cut(model: nn.Module) -> pykern.Pipeline:
    return pykern.Pipeline(
        model, devices="cpu:4", microbatches=2, loss_fn=F.mse_loss, sample=torch.randn(2, WIDTH)
    )


def here(model: nn.Module) -> str:
    """The marked line, as a message names it."""
    lines, start = inspect.getsourcelines(type(model))
    (number,) = (number for number, line in enumerate(lines) if line.endswith("# here\n"))
    return re.escape(f"test_refused.py:{start + number}")


READS = r"reads the values of a tensor \({}\) that the model has computed"

REFUSED: dict[type[nn.Module], str] = {
    Item: READS.format("item"),
    Branch: READS.format("__bool__"),
    ToList: READS.format("tolist"),
    Numpy: READS.format("numpy"),
    Loop: READS.format("__bool__"),
    Cached: r"is given a Cache .*, which holds tensors and outlives the call of the model",
    Finds: r"uses a tensor of shape \(2, 8\) that has been made where it is not seen",
    Writes: "in stage 1, writes into a tensor of stage 0 of which a view is used as well",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_line_and_the_reason_are_named(kind: type[nn.Module]) -> None:
    model = kind()
    with pytest.raises(CutError, match=REFUSED[kind]) as caught:
        cut(model)
    assert re.search(here(model), str(caught.value))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_layers(reentrant: bool) -> None:
    with pytest.raises(
        CutError, match=r"\(test_refused.py:\d+\).* [uU]se Pipeline\(recompute='layer"
    ):
        cut(Checkpointed(reentrant=reentrant))


def test_attributes_left_by_a_forward_that_is_cut() -> None:
    with pytest.raises(CutError, match=r"leaves a tensor in Leaves\.last, .* Return it"):
        cut(Leaves())


def _pre_hook(model: nn.Module) -> object:
    return model.register_forward_pre_hook(lambda module, args: None)


def _hook(model: nn.Module) -> object:
    return model.register_forward_hook(lambda module, args, output: None)


def _backward_hook(model: nn.Module) -> object:
    return model.register_full_backward_hook(lambda module, inputs, outputs: None)


@pytest.mark.parametrize("register", [_pre_hook, _hook, _backward_hook])
def test_hooks_of_a_module_that_is_cut(register: Callable[[nn.Module], object]) -> None:
    class Outer(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    model = Outer()
    register(model)
    with pytest.raises(CutError, match=r"the model \(Outer\) has hooks, which would not be called"):
        cut(model)
    # Hooks of layers are called: there is nothing to refuse.
    model = Outer()
    for layer in model.layers:
        register(layer)
    cut(model).close()


def test_a_model_compiled_as_a_whole() -> None:
    class Outer(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    model = Outer()
    model.compile(backend="eager")
    with pytest.raises(CutError, match=r"the model \(Outer\) is compiled as a whole; compile its"):
        cut(model)


class Encoder(nn.Module):
    """An encoder of padded sequences, with a layer before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, **options)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return self.encoder(self.before(x), src_key_padding_mask=is_padding)


@pytest.mark.parametrize("mask_check", [True, False])
def test_nested_tensors_of_an_encoder(mask_check: bool) -> None:
    x, is_padding = torch.randn(4, 3, 8), torch.tensor([[False, False, True]]).expand(4, -1)
    model = Encoder(mask_check=mask_check)
    with small(model, sample=(x[:2], is_padding[:2])) as pipe, torch.no_grad():
        pipe(x, is_padding)
        pipe.eval()
        refused = (
            r"encoder \(TransformerEncoder\) makes nested tensors .* enable_nested_tensor=False"
        )
        with pytest.raises(CutError, match=refused):
            pipe(x, is_padding)
        model.encoder.use_nested_tensor = False
        parts = zip(x.split(2), is_padding.split(2), strict=True)
        assert torch.equal(pipe(x, is_padding), torch.cat([model(*part) for part in parts]))
