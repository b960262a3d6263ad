"""Any model: the first half of the table of features, a test for each row."""

import copy
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.features.plain import (
    NUM_MICROBATCHES,
    assert_trains_alike,
    chain,
    pipeline,
    plain_step,
)
from tests.features.table import row
from tests.support.comparison import assert_same_gradients
from tests.trace.models import Given, Network

X, Y = torch.randn(8, 8), torch.randn(8, 8)


def of_last(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["last"], target)


def network_batch() -> tuple[list[Any], dict[str, Any]]:
    tokens, mask = torch.randint(0, 10, (8, 5)), torch.rand(8, 5) > 0.3
    return [tokens, mask], {"sample": (tokens[:2], mask[:2])}


@row("One process drives all devices", "n y n n n n")
def test_one_process_drives_all_devices() -> None:
    seen: set[int] = set()

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(threading.get_ident())
            return super().forward(x)

    with pipeline([Noting(8, 8) for _ in range(4)], devices="cpu:4") as pipe:
        assert pipe.step(X, target=Y).dim() == 0
    assert len(seen) == 4


@row("Arbitrary `nn.Module`", "y n p n p n")
def test_arbitrary_module() -> None:
    args, options = network_batch()
    assert_trains_alike(Network(), args, Y, of_last, **options)


@row("Split at named points", "y n n y n n")
def test_split_at_named_points() -> None:
    args, options = network_batch()
    options["split_at"] = ["blocks.1.down"]
    assert_trains_alike(Network(), args, Y, of_last, **options)


@row("Balance by layer count", "titan y y y n p")
def test_balance_by_layer_count() -> None:
    with pipeline(chain(7), devices="cpu:3", balance="layers") as pipe:
        assert sorted(len(span) for span in pipe.partition.stages) == [2, 2, 3]


@row("Balance by parameters or by patterns of names", "n p y n n n")
def test_balance_by_parameters_and_by_prices() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    with pipeline(model, balance="parameters") as pipe:
        assert [len(span) for span in pipe.partition.stages] == [1, 2]
    named = nn.Sequential()
    for name in ("embed", "block_1", "block_2", "head"):
        named.add_module(name, nn.Linear(8, 8))
    with pipeline(named, balance={"embed": 0, "head": 2, "block*": 1}) as pipe:
        assert [len(span) for span in pipe.partition.stages] == [3, 1]


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(400):
            x = x + 1
        return super().forward(x - 400)


@row("Balance by measured time", "n y n n n n")
def test_balance_by_measured_time() -> None:
    model = [Slow(8, 8), *(nn.Linear(8, 8) for _ in range(5))]
    with pipeline(model, balance="time", sample=X[:2]) as pipe:
        assert [len(span) for span in pipe.partition.stages] == [1, 5]


class Wide(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x] * 200).tanh().exp()[: len(x)])


@row("Balance by measured memory", "n y n n n n")
def test_balance_by_measured_memory() -> None:
    model = [Wide(8, 8), *(nn.Linear(8, 8) for _ in range(5))]
    with pipeline(model, balance="memory", sample=X[:2]) as pipe:
        assert [len(span) for span in pipe.partition.stages] == [1, 5]


@row("Skip connections", "p y n n n n")
def test_skip_connections() -> None:
    def skipping(self: Given, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.third(self.second(first).relu()) * first + x

    for schedule in ("gpipe", "one_f_one_b", "zb_h1"):
        options = {"sample": X[:2, :4], "devices": "cpu:3", "schedule": schedule}
        assert_trains_alike(Given(skipping), [X[:, :4]], Y[:, :4], F.mse_loss, **options)


@row("Tied parameters across devices", "p n y y n y")
def test_tied_parameters_across_devices() -> None:
    model = chain()
    first, last = model[0], model[3]
    assert isinstance(first, nn.Sequential)
    assert isinstance(last, nn.Sequential)
    last[0].weight = first[0].weight
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        assert len(list(pipe.parameters())) == 7
        loss = pipe.step(X, target=Y)
        assert torch.equal(loss, plain_step(plain, F.mse_loss, [X], Y))
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            # One gradient, of which the stages' sums are added in a fixed order.
            torch.testing.assert_close(ours.grad, theirs.grad)


class Gated(nn.Linear):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


@row("Keyword arguments on any stage", "y n n y n y")
def test_keyword_arguments_on_any_stage() -> None:
    layers, gate = [Gated(8, 8), nn.Linear(8, 8), Gated(8, 8)], torch.rand(8, 1)
    plain = copy.deepcopy(layers)
    with pipeline(layers, devices="cpu:3") as pipe:
        loss = pipe.step(X, gate=gate, target=Y)

    def call(x: Tensor, gate: Tensor) -> Any:
        return plain[2](plain[1](plain[0](x, gate)), gate)

    assert torch.equal(loss, plain_step(call, F.mse_loss, [X, gate], Y))


@dataclass
class State:
    hidden: Tensor
    note: Any


class Packs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"state": State(super().forward(x), None), "more": (2, None, [x])}


class Unpacks(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        scale, nothing, (given,) = x["more"]
        assert nothing is None
        return super().forward(x["state"].hidden * scale + given)


@row("Dicts, dataclasses, `None` and numbers between stages", "n n n p n n")
def test_values_of_any_form_between_stages() -> None:
    for recompute in (None, "stage"):
        layers = [Packs(8, 8), Unpacks(8, 8)]
        assert_trains_alike(layers, [X], Y, F.mse_loss, recompute=recompute)


class WithIndex(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.argmax(1), y.detach() > 0


class ByIndex(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        x, index, positive = x
        return super().forward(x * positive) + index[:, None]


@row("Tensors without gradients between stages", "y p p y n p")
def test_tensors_without_gradients_between_stages() -> None:
    assert_trains_alike([WithIndex(8, 8), ByIndex(8, 8)], [X], Y, F.mse_loss)


@row("The batch size may change", "p y p y n n")
def test_the_batch_size_may_change() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        for rows in (8, 4, 16, 8):
            x, y = torch.randn(rows, 8), torch.randn(rows, 8)
            assert torch.equal(pipe.step(x, target=y), plain_step(plain, F.mse_loss, [x], y))
            assert_same_gradients(pipe, plain)
            assert pipe(x).shape == (rows, 8)


@row("Uneven last microbatch", "n y n n n n")
def test_uneven_last_microbatch() -> None:
    assert_trains_alike(chain(), [X[:7]], Y[:7], F.mse_loss)


@row("Fewer microbatches than stages", "p y y p n n")
def test_fewer_microbatches_than_stages() -> None:
    assert NUM_MICROBATCHES < 5
    for schedule in ("gpipe", "one_f_one_b", "zb_h1"):
        assert_trains_alike(chain(5), [X], Y, F.mse_loss, devices="cpu:5", schedule=schedule)


@row("Deferred batch normalisation", "n y n n n n")
def test_deferred_batch_normalisation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    batch = nn.BatchNorm1d(8)
    batch(X)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(X, target=Y)
    # Statistics move once, by those of the full batch.
    torch.testing.assert_close(model[0].running_mean, batch.running_mean)
    torch.testing.assert_close(model[0].running_var, batch.running_var)
    assert model[0].num_batches_tracked == 1


@row("Frozen parts, unused parameters, integer inputs", "p y p y n p")
def test_frozen_unused_and_integers() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Embedding(10, 8).requires_grad_(False)
            self.layers = chain(2)
            self.unused = nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Any:
            return self.layers(self.frozen(tokens).mean(1))

    tokens = torch.randint(0, 10, (8, 3))
    for schedule in ("one_f_one_b", "zb_h1"):
        options = {"sample": tokens[:2], "schedule": schedule}
        assert_trains_alike(Parts(), [tokens], Y, F.mse_loss, **options)


@row("`torch.compile`d layers", "p ? ? p n n")
def test_compiled_layers() -> None:
    torch._dynamo.reset()
    model = chain(2)
    plain = copy.deepcopy(model)
    for layer in (*model, *plain):
        layer.compile(backend="eager")
    with pipeline(model, schedule="zb_h1") as pipe:
        ours = pipe.step(X, target=Y)
        assert torch.equal(ours, plain_step(plain, F.mse_loss, [X], Y))
        assert_same_gradients(pipe, plain)
        assert list(pipe.state_dict()) == list(plain.state_dict())


@row("Activation checkpointing built in", "n y y y n p")
def test_activation_checkpointing() -> None:
    for recompute in ("layer", "stage"):
        assert_trains_alike(chain(), [X], Y, F.mse_loss, recompute=recompute)
    budget = pykern.Budget(2000, sample=X[:2], target=Y[:2])
    with pipeline(chain(), recompute=budget) as pipe:
        assert pipe.fitted is not None
        assert max(pipe.fitted.peak_bytes) <= 2000


@row("Steps compared with the plain model, the first difference located", "n n n n n n")
def test_verified_steps() -> None:
    def wrong_on_workers(gradient: Tensor) -> Tensor:
        return gradient * (1 + (threading.current_thread() is not threading.main_thread()))

    with pipeline(chain(), verify=1) as pipe:
        pipe.step(X, target=Y)
        pipe.get_parameter("3.0.bias").register_hook(wrong_on_workers)
        with pytest.raises(pykern.VerifyError, match=r"'3.0.bias': 8 of 8 values") as caught:
            pipe.step(X, target=Y)
    assert (caught.value.stage, caught.value.layer) == (1, "3")


@row("Gradients through the call, any loss outside", "n y n n n n")
def test_a_loss_outside() -> None:
    model = chain()
    with pipeline(model) as pipe:
        x = X.clone().requires_grad_()
        ends = [x, *model.parameters()]
        found = torch.autograd.grad(pipe(x).tanh().square().mean(), ends)
        torch.testing.assert_close(
            found, torch.autograd.grad(model(x).tanh().square().mean(), ends)
        )
