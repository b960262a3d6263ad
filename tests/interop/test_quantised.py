"""LoRA on a quantised base: the bits of the model alone, whatever holds the base's weights."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import pykern
from pykern import checkpoint
from pykern.partition.balance import partition
from pykern.runtime.stage.layer_copies import copy_layers
from pykern.tensors.parameters import num_bytes, num_values
from tests.support.plain_step import by_microbatch
from tests.support.quantised import KINDS, FourBits, of_codes, quantise

from .test_hugging_face import ROWS, batch, llama, parts
from .test_peft import assert_gradients, lora, pipeline

peft = pytest.importorskip("peft")

# peft asks for names that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

OPTIONS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "must not be in DistributedDataParallel for a plan that splits backwards, got one that is": {
        "schedule": "zb_h1"
    },
    "recompute": {"schedule": "one_f_one_b", "recompute": "layer"},
    "recompute and split backward": {"schedule": "zb_h1", "recompute": "stage"},
    "replicas": {"schedule": "chimera"},
    "balanced by memory": {"balance": "memory"},
    "balanced by time": {"balance": "time"},
    "verified": {"verify": True},
    "looked at": {"check_finite": "activations"},
}


def adapted(kind: str) -> Any:
    model = llama()
    quantise(model.model.layers, kind)
    return peft.get_peft_model(model, lora("llama")).train()


def require_the_bits(kind: str, options: str) -> None:
    model = adapted(kind)
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    of_each = list(parts(given))
    num_replicas = 2 if options == "replicas" else 1
    with pipeline(model, given, **OPTIONS[options]) as pipe:
        for _ in range(3):
            loss = pipe.step(**given)
            wanted = by_microbatch(
                plain, [ROWS] * 4, lambda i, _: plain(**of_each[i]).loss, num_replicas
            )
            assert torch.equal(loss, wanted)
            assert_gradients(model, plain)
        assert list(pipe.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    "options", ["recompute and split backward", "replicas", "balanced by memory", "verified"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_a_quantised_base(kind: str, options: str) -> None:
    require_the_bits(kind, options)


@pytest.mark.nightly
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_a_quantised_base_in_every_way(kind: str, options: str) -> None:
    require_the_bits(kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_outside(kind: str) -> None:
    model = adapted(kind)
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    of_each = list(parts(given))
    with pipeline(model, given, schedule="gpipe") as pipe:
        pipe(**given).loss.backward()
        by_microbatch(plain, [ROWS] * 4, lambda i, _: plain(**of_each[i]).loss)
        assert_gradients(model, plain)


class Own(nn.Parameter):
    """A parameter that trains, of a class of its own."""

    factor: float


class Scaled(nn.Linear):
    """Computes with an attribute of its parameter."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.weight: Any = Own(self.weight.detach())
        self.weight.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is Own
        return super().forward(x) * self.weight.factor


@pytest.mark.parametrize("outside", [False, True])
def test_parameters_that_train_keep_their_class(outside: bool) -> None:
    """Copies for replicas and for calls with a graph, and measurements, had torch's."""
    layers = nn.Sequential(*(Scaled() for _ in range(4)))
    plain = copy.deepcopy(layers)
    for module in (*layers, *plain):
        cast(Any, module).weight.factor = 3.0
    x = torch.randn(8, 8)
    options: dict[str, Any] = {"schedule": "gpipe"} if outside else {"schedule": "chimera"}
    with pykern.Pipeline(
        layers,
        devices="cpu:2",
        microbatches=4,
        loss_fn=lambda y, _: y.square().mean(),
        balance="time",
        sample=x[:2],
        **options,
    ) as pipe:
        if outside:
            sum(part.square().mean() / 4 for part in pipe(x).split(2)).backward()
        else:
            pipe.step(x, target=x)
    by_microbatch(
        plain, [2] * 4, lambda i, _: plain(x[2 * i : 2 * i + 2]).square().mean(), 1 + (not outside)
    )
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_bytes_of_quantised_weights_are_those_in_memory() -> None:
    linear = nn.Linear(32, 16, bias=False)
    assert num_bytes(linear.weight) == 16 * 32 * 4
    assert num_bytes(of_codes(linear).weight) == 16 * 32 + 16 * 4
    assert num_bytes(FourBits(linear).weight) == 16 * 32 // 2 + 16 * 4


def test_two_weights_in_a_byte_are_two_where_parameters_are_counted() -> None:
    layers = [nn.Linear(32, 32, bias=False) for _ in range(4)]
    packed = [FourBits(layer) for layer in layers[:2]]
    assert [num_values(layer.weight) for layer in (packed[0], layers[0])] == [32 * 32] * 2
    assert num_values(of_codes(layers[0]).weight) == 32 * 32
    # By bytes, the two packed ones would be as one of the others.
    cut = partition([*packed, *layers[2:]], 2)
    assert [len(stage) for stage in cut.stages] == [2, 2]


def test_memory_counts_moments_where_weights_train() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    for layer in layers[:4]:
        layer.requires_grad_(False)
    cut = partition(layers, 2, balance="memory", sample=torch.randn(1, 64))
    # Four times the bytes of a frozen one for each of the last two.
    assert [len(stage) for stage in cut.stages] == [5, 1]


def test_a_copy_elsewhere_takes_its_state_along() -> None:
    """The library moves the state that the original has, too."""
    layer = FourBits(nn.Linear(8, 8))
    copies, _ = copy_layers([layer], torch.device("meta"))
    copied = cast(FourBits, copies[0])
    state = copied.weight.quant_state
    assert isinstance(state, type(layer.weight.quant_state))
    assert copied.weight.is_meta
    assert state.scale.is_meta
    assert not layer.weight.quant_state.scale.is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_adapters_and_optimizer_alone(kind: str, tmp_path: Path) -> None:
    given = batch(padded=True, caches=True)
    model = adapted(kind)
    other = copy.deepcopy(model)

    def optimizer_of(one: nn.Module) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        trained = nn.ParameterList(p for p in one.parameters() if p.requires_grad)
        return trained, torch.optim.AdamW(trained, lr=1e-2)

    with pipeline(model, given) as pipe:
        trained, optimizer = optimizer_of(model)
        pipe.step(**given)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(tmp_path / "adapters", trained, optimizer)
        wanted = pipe.step(**given)
        optimizer.step()
    with pipeline(other, given, devices="cpu:3") as pipe:
        again, resumed = optimizer_of(other)
        checkpoint.load(tmp_path / "adapters", again, resumed)
        assert torch.equal(pipe.step(**given), wanted)
        resumed.step()
    for ours, theirs in zip(again, trained, strict=True):
        assert torch.equal(ours, theirs)
