"""Verified steps leave all that unverified ones leave, and pass whatever a pipeline can do."""

import copy
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.kernels.head_loss import LazyLogits, LinearCrossEntropy
from tests.fake_cuda.fake import FakeCuda

WIDTH = 8
X, Y = torch.randn(7, WIDTH), torch.randn(7, WIDTH)


class Counts(nn.Module):
    """Depends on how often it has been called, and on generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        drawn = random.random() + np.random.random()
        return x * (self.calls + drawn) + torch.rand(x.shape, generator=self.own)


class WritesTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + self.bias


def model() -> nn.Sequential:
    """Random numbers of four kinds, running statistics, and a first layer that works in place."""
    return nn.Sequential(
        WritesTheBatch(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.3),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        Counts(),
        nn.Linear(WIDTH, WIDTH),
    )


def pipeline(layers: Any, **options: Any) -> pykern.Pipeline:
    settings: dict[str, Any] = {"devices": "cpu:2", "microbatches": 3, "verify": 1}
    settings["loss_fn"] = F.mse_loss
    kind = pykern.AsyncPipeline if "optimizer" in options else pykern.Pipeline
    return kind(layers, **(settings | options))


def everything(layers: nn.Sequential, verify: bool) -> list[Any]:
    """The results of three steps, and the state behind them."""
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    found: list[Any] = []
    collected: list[Any] = []
    with pipeline(layers, verify=verify and 1) as pipe:
        for number in range(3):
            x = X.clone()
            found += [pipe.step(x, target=Y), x]
            if number == 0:
                collected = [parameter.grad for parameter in pipe.parameters()]
        assert all(p.grad is g for p, g in zip(pipe.parameters(), collected, strict=True))
        found += collected
        found += [pipe.train(number == 1)(X.clone()) for number in range(2)]
        found += pipe.buffers()
    own: Any = layers[5]
    found += [torch.get_rng_state(), own.own.get_state(), torch.tensor(own.calls)]
    found += [torch.tensor(random.random()), torch.tensor(np.random.random())]
    return found


def test_all_is_as_after_unverified_steps() -> None:
    layers = model()
    other = copy.deepcopy(layers)
    for one, two in zip(everything(layers, True), everything(other, False), strict=True):
        assert torch.equal(one, two)


def test_without_it_the_executor_itself_runs_steps() -> None:
    with pipeline(model(), verify=False) as pipe:
        assert pipe._steps is pipe._executor


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        (True, [1, 0, 0, 0, 0]),
        (pykern.Verify(), [1, 0, 0, 0, 0]),
        (1, [1, 1, 1, 1, 1]),
        (2, [1, 0, 1, 0, 1]),
        (pykern.Verify(every=3), [1, 0, 0, 1, 0]),
        (False, [0, 0, 0, 0, 0]),
    ],
)
def test_steps_and_forwards_are_counted_by_themselves(verify: Any, expected: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    calls: list[None] = []
    layers[0].register_forward_hook(lambda *_: calls.append(None))
    with pipeline(layers, verify=verify) as pipe:
        for run in (lambda: pipe.step(X, target=Y), lambda: pipe(X)):
            found = []
            for _ in range(5):
                calls.clear()
                run()
                found.append(len(calls) // 3 - 1)
            assert found == expected


@pytest.mark.parametrize(
    ("verify", "kind", "words"),
    [
        (0, ValueError, "verify must be True, False, a whole number of at least 1 or"),
        (-1, ValueError, "got -1"),
        (None, TypeError, "got None"),
        ("first", TypeError, "got 'first'"),
        (1.5, TypeError, "got 1.5"),
    ],
)
def test_other_values_are_refused(verify: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        pipeline(model(), verify=verify)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"every": 0}, ValueError, "every must be 1 to 16777216, got 0"),
        ({"every": True}, TypeError, "every must be"),
        ({"rtol": -1.0}, ValueError, "rtol must be finite and at least 0, got -1.0"),
        ({"atol": float("nan")}, ValueError, "atol must be finite"),
        ({"atol": "0"}, TypeError, "atol must be a number, got '0'"),
    ],
)
def test_other_bounds_are_refused(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        pykern.Verify(**arguments)


@pytest.mark.parametrize("beside", ["process_group", "tensor_parallel"])
def test_other_processes_are_refused(beside: str) -> None:
    with pytest.raises(ValueError, match=f"verify must be False beside {beside}"):
        pipeline(model(), **{beside: object()})


def test_updates_within_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="verify must be False here, got 1"):
        pipeline(model(), schedule="pipedream", optimizer=torch.optim.SGD)


def test_a_hook_that_may_update_weights_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pipeline(layers) as pipe:
        bias = layers.get_parameter("1.bias")
        handle = bias.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(RuntimeError, match=r"'1.bias' has a hook"):
            pipe.step(X, target=Y)
        handle.remove()
        pipe.step(X, target=Y)


def test_an_error_of_a_stage_is_as_ever() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pipeline([nn.Linear(WIDTH, WIDTH), Fails(WIDTH, WIDTH)]) as pipe:
        with pytest.raises(KeyError, match="mine") as caught:
            pipe.step(X, target=Y)
        assert "stage 1, microbatch 0" in str(caught.value.__notes__)


def test_an_open_stream_is_left_alone() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pipeline(layers) as pipe:
        stream = pipe.stream(X for _ in range(9))
        # The first is to tell whether layers draw, so that no others are under way.
        first, _ = next(stream), next(stream)
        with pytest.raises(RuntimeError, match="the pipeline is streaming"):
            pipe.step(X, target=Y)
        assert all(torch.equal(output, first) for output in stream)
        pipe.step(X, target=Y)


def test_nothing_is_kept_of_a_step() -> None:
    with pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))) as pipe:
        x = X.clone()
        kept = weakref.ref(x)
        pipe.step(x, target=Y)
        del x
        assert kept() is None


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "hanayo", "chimera"])
@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
def test_recompute(schedule: str, recompute: Any) -> None:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(8))
    )
    with pipeline(layers, schedule=schedule, microbatches=4, recompute=recompute) as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_replicas_with_hooks_of_parameters(reduction: Any) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers.get_parameter("2.weight").register_hook(lambda gradient: gradient.round(decimals=3))
    with pipeline(layers, devices="cpu:4", microbatches=5, replicas=2, reduction=reduction) as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)


@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_parameters_to_the_bit(replicas: int) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers[3].weight = layers[0].weight
    layers[2].bias = layers[1].bias
    with pipeline(layers, devices=f"cpu:{2 * replicas}", replicas=replicas) as pipe:
        assert pipe.partition.num_stages == 2
        for _ in range(2):
            pipe.step(X, target=Y)
        assert layers[3].weight is layers[0].weight


class Trained(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return F.mse_loss(F.dropout(output) * self.factor, target)


def test_a_loss_that_trains_and_draws() -> None:
    loss_fn = Trained()
    with pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), loss_fn=loss_fn
    ) as p:
        for _ in range(2):
            p.step(X, target=Y)
    assert loss_fn.count == 6
    assert loss_fn.factor.grad is not None


def test_a_parameter_of_the_loss_is_named() -> None:
    class Elsewhere(Trained):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            Elsewhere.calls += 1
            factor = self.factor if Elsewhere.calls <= 3 else self.factor.detach()
            return F.mse_loss(output * factor, target)

    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with (
        pipeline(layers, loss_fn=Elsewhere()) as pipe,
        pytest.raises(pykern.VerifyError, match=r"'loss_fn.factor'") as caught,
    ):
        pipe.step(X, target=Y)
    assert caught.value.stage is None


def test_autocast_and_a_scaler() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with pipeline(layers) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(X, target=Y, scaler=scaler)
            pipe.step(X, target=Y)
        assert pipe.to(torch.bfloat16) is pipe
    with pipeline(layers) as pipe:
        layers.zero_grad()
        pipe.step(X.bfloat16(), target=Y.bfloat16(), scaler=scaler)


class Named(nn.Linear):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


def test_arguments_by_name() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Named(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with pipeline(layers) as pipe:
        pipe.step(X, target=Y, mask=(X > 0).float())
        pipe(X, mask=X)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_are_those_of_the_whole_batch(momentum: Any) -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, momentum=momentum),
        nn.Linear(WIDTH, WIDTH),
        nn.Unflatten(1, (2, 4)),
        nn.BatchNorm1d(2),
        nn.Flatten(),
    )
    with pipeline(layers, deferred_batch_norm=True) as pipe:
        for _ in range(3):
            pipe.step(X, target=Y)
        assert layers[1].num_batches_tracked == 3


def test_wrong_deferred_statistics_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern.runtime.features import batch_norm  # noqa: PLC0415 - what is broken

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    real = batch_norm._updates
    monkeypatch.setattr(batch_norm, "_updates", lambda module, seen: real(module, seen[:-1]))
    with (
        pipeline(layers, deferred_batch_norm=True) as pipe,
        pytest.raises(pykern.VerifyError, match=r"buffer '1.running_mean'"),
    ):
        pipe.step(X, target=Y)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(101, WIDTH))

    def forward(self, x: Tensor) -> LazyLogits | Tensor:
        if self.training and torch.is_grad_enabled():
            return LazyLogits(x, self.weight)
        return F.linear(x, self.weight)


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("options", [{}, {"recompute": "layer"}, {"schedule": "chimera"}])
def test_a_loss_that_does_its_backward_at_once(main: bool, options: Any) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Head())
    if main:
        weight: Any = layers[3].weight
        weight.main_grad = torch.zeros(101, WIDTH)
    target = torch.randint(101, (7,))
    with pipeline(layers, microbatches=4, loss_fn=LinearCrossEntropy(), **options) as pipe:
        for _ in range(2):
            pipe.step(X, target=target)


@pytest.mark.parametrize("capture", [False, True, "step"])
def test_gpus(gpus: FakeCuda, capture: Any) -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with pipeline(layers, devices=["cuda:0", "cuda:1"], microbatches=4, capture=capture) as pipe:
        for _ in range(4):
            pipe.step(x, target=y)
        assert (gpus.calls("cuGraphLaunch") > 0) == (capture is not False)


class Doubles(nn.Linear):
    """Wrong in all but the plain model's calls, which come first."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Doubles.calls += 1
        return super().forward(x) * Doubles.calls


@pytest.mark.parametrize("capture", [False, "auto"])
def test_gpus_name_the_boundary(gpus: FakeCuda, capture: Any) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubles(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    gpu_names = ["cuda:0", "cuda:1", "cuda:2"]
    with (
        pipeline(layers, devices=gpu_names, capture=capture) as pipe,
        pytest.raises(pykern.VerifyError) as caught,
    ):
        pipe.step(x, target=y)
    assert caught.value.origin.boundary == (None if capture else (1, 2))
