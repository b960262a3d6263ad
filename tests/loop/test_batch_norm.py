"""Deferred batch normalisation: running statistics of the full batch, once in a step."""

import copy
import random
import signal
import timeit
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from pykern import schedules
from tests.fake_cuda.fake import FakeCuda
from tests.loop.loops import pipeline
from tests.support.plain_step import rows_of


def norms(dimensions: int, **options: Any) -> nn.Sequential:
    """Four layers with two batch norms, of inputs with so many dimensions behind the channels."""
    kind: Any = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dimensions]
    first: nn.Module = nn.Linear(4, 4)
    if dimensions > 0:
        conv: Any = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dimensions - 1]
        first = conv(4, 4, 1)
    return nn.Sequential(first, kind(4, **options), nn.Tanh(), kind(4, **options))


def data(dimensions: int, rows: int = 11) -> tuple[Tensor, Tensor]:
    shape = (rows, 4, *([3] * dimensions))
    return 5 + 2 * torch.randn(shape), torch.randn(shape)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class Reference:
    """Each microbatch by its own statistics; running ones by the formula, of all rows at once."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = copy.deepcopy(model)
        self.seen: dict[nn.Module, list[Tensor]] = {}
        for module in self.model:
            if is_norm(module):
                module.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, arguments: tuple[Tensor]) -> None:
        self.seen.setdefault(module, []).append(arguments[0].detach())

    def step(self, x: Tensor, y: Tensor, num_microbatches: int) -> None:
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.seen.clear()
        rows = rows_of(len(x), num_microbatches)
        for part, target in zip(x.split(rows), y.split(rows), strict=True):
            (F.mse_loss(self.model(part), target) * (len(part) / len(x))).backward()
        for name, module in self.model.named_modules():
            if is_norm(module):
                self._update(name, module, buffers)

    def _update(self, name: str, module: Any, before: dict[str, Tensor]) -> None:
        values = torch.cat(self.seen[module]).double().transpose(0, 1).flatten(1)
        tracked = before[f"{name}.num_batches_tracked"] + 1
        factor = 1 / tracked.item() if module.momentum is None else module.momentum
        module.num_batches_tracked.copy_(tracked)
        for kind, new in (("mean", values.mean(1)), ("var", values.var(1, correction=1))):
            old = before[f"{name}.running_{kind}"].double()
            getattr(module, f"running_{kind}").copy_((1 - factor) * old + factor * new)


def assert_as(pipe: nn.Module, reference: Reference) -> None:
    """Gradients to the bit; statistics but for rounding."""
    for name, parameter in pipe.named_parameters():
        theirs = reference.model.get_parameter(name).grad
        assert parameter.grad is not None
        assert theirs is not None
        assert torch.equal(parameter.grad, theirs), name
    for name, buffer in pipe.named_buffers():
        torch.testing.assert_close(buffer, reference.model.get_buffer(name), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
@pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
def test_statistics_are_those_of_the_full_batch(dimensions: int, momentum: float | None) -> None:
    model = norms(dimensions, momentum=momentum)
    names = list(model.state_dict())
    reference = Reference(model)
    with pipeline(model, deferred_batch_norm=True, microbatches=4) as pipe:
        for _ in range(3):
            x, y = data(dimensions)
            pipe.step(x, target=y)
            reference.step(x, y, 4)
            assert_as(pipe, reference)
        assert list(pipe.state_dict()) == names
        assert pipe.get_buffer("1.num_batches_tracked") == 3
        pipe.eval()
        reference.model.eval()
        x, _ = data(dimensions)
        outputs = torch.cat([reference.model(part) for part in x.split([3, 3, 3, 2])])
        torch.testing.assert_close(pipe(x), outputs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_h1", "v_min"])
def test_every_schedule_gives_the_same_bits(schedule: str, recompute: Any) -> None:
    """R runs a forward once more, which counts once."""
    model = norms(1)
    alone, reference = copy.deepcopy(model), Reference(model)
    options: dict[str, Any] = {"deferred_batch_norm": True, "microbatches": 4}
    with (
        pipeline(model, schedule=schedule, recompute=recompute, **options) as pipe,
        pipeline(alone, devices="cpu:1", schedule="gpipe", **options) as one,
    ):
        for _ in range(2):
            x, y = data(1)
            pipe.step(x, target=y)
            one.step(x, target=y)
            reference.step(x, y, 4)
            assert_as(pipe, reference)
            for name, buffer in pipe.named_buffers():
                assert torch.equal(buffer, one.get_buffer(name)), name


def test_a_mean_far_from_zero_keeps_its_variance() -> None:
    """The difference of large squares would have none left."""
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 4))
    x = 1e4 + torch.randn(64, 4)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=torch.randn(64, 4))
        variance = x.double().var(0).float()
        torch.testing.assert_close(pipe.get_buffer("1.running_var"), variance, rtol=1e-3, atol=0)


class Checkpointed(nn.Module):
    """Recomputes by itself in its backward."""

    def __init__(self, use_reentrant: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm is None else norm
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=self.use_reentrant)


def test_layers_that_recompute_by_themselves_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 4), nn.Tanh())
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())
    plain.load_state_dict(
        {name.replace("norm.", ""): value for name, value in model.state_dict().items()}
    )
    x, y = data(0)
    with (
        pipeline(model, deferred_batch_norm=True) as pipe,
        pipeline(plain, deferred_batch_norm=True) as reference,
    ):
        pipe.step(x, target=y)
        reference.step(x, target=y)
        for kind in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(pipe.get_buffer(f"1.norm.{kind}"), reference.get_buffer(f"1.{kind}"))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "zb_h1", "interleaved"])
def test_statistics_in_another_order_than_the_plain_models_are_refused(
    schedule: str, use_reentrant: bool
) -> None:
    """A layer with its own checkpoint updates statistics again in its backward, after forwards."""
    model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(4, 4), nn.Tanh())))
    model[3] = Checkpointed(use_reentrant)
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 4}
    if schedule == "interleaved":
        options["num_chunks"] = 2
    x, y = data(0)
    with (
        pipeline(model, **options) as pipe,
        pytest.raises(RuntimeError, match="again in a backward") as caught,
    ):
        pipe.step(x, target=y)
    assert "deferred_batch_norm=True" in str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_other_buffers_in_another_order_are_refused(schedule: str) -> None:
    layer = Checkpointed(norm=spectral_norm(nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh())
    x, y = data(0)
    with (
        pipeline(model, schedule=schedule, microbatches=4) as pipe,
        pytest.raises(RuntimeError, match=r"writes to the buffer 'norm\..*' of its layer 1 again"),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_in_the_order_of_the_plain_model_are_not_refused(use_reentrant: bool) -> None:
    """In the last stage of 1F1B each backward follows its forward, as in a loop."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Checkpointed(use_reentrant))
    plain = copy.deepcopy(model)
    x, y = data(0)
    with pipeline(model, microbatches=4, balance=[2, 2]) as pipe:
        pipe.step(x, target=y)
        rows = rows_of(len(x), 4)
        for part, target in zip(x.split(rows), y.split(rows), strict=True):
            (F.mse_loss(plain(part), target) * (len(part) / len(x))).backward()
        for (name, buffer), expected in zip(pipe.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, expected), name


def test_a_step_that_fails_leaves_the_statistics() -> None:
    model = norms(0)
    reference = Reference(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, y = data(0)
    wrong = y.clone()
    wrong[-1] = 1000

    def fail(output: Tensor, target: Tensor) -> Tensor:
        if target.max() == 1000:
            raise LookupError("in the last microbatch")
        return F.mse_loss(output, target)

    with pipeline(model, deferred_batch_norm=True, loss_fn=fail, microbatches=4) as pipe:
        with pytest.raises(LookupError, match="in the last microbatch"):
            pipe.step(x, target=wrong)
        for name, buffer in pipe.named_buffers():
            assert torch.equal(buffer, before[name]), name
        pipe.zero_grad()
        pipe.step(x, target=y)
        reference.step(x, y, 4)
        assert_as(pipe, reference)


def test_what_does_not_track_or_train_is_left_alone() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 4, 1),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.BatchNorm1d(4).eval(),
        nn.InstanceNorm1d(4, track_running_stats=True),
    )
    evaluated = copy.deepcopy(model[2].state_dict())
    x, y = data(1)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        for name, value in evaluated.items():
            assert torch.equal(model[2].state_dict()[name], value)
        # Not of the batch, and each microbatch updates them.
        assert not torch.equal(pipe.get_buffer("3.running_mean"), torch.zeros(4))


def test_afterwards_the_modules_are_as_before() -> None:
    model = norms(0)
    x, y = data(0)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
    plain = copy.deepcopy(model)
    assert all(not module._forward_pre_hooks for module in model.modules())
    for one in (model, plain):
        one(x)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name))
    assert model.get_buffer("1.num_batches_tracked") == 2


def test_modules_that_come_later_are_deferred_too() -> None:
    """The first one that the model has, and one in place of another."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), block, nn.Tanh())
    x, y = data(0)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        last = nn.BatchNorm1d(4, momentum=None)
        for norm in (nn.BatchNorm1d(4), last):
            del block[1:]
            block.append(norm)
            for number in (1, 2):
                pipe.step(x, target=y)
                assert norm.num_batches_tracked == number
        torch.testing.assert_close(last.running_mean, block[0](model[0](x)).mean(0))
    assert not any(module._forward_pre_hooks for module in model.modules())


class ByName(nn.BatchNorm1d):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(input=x)


def test_modules_may_be_called_by_name() -> None:
    torch.manual_seed(1)
    found = []
    for kind in (nn.BatchNorm1d, ByName):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), kind(4), nn.Tanh(), nn.Linear(4, 4))
        x, y = data(0)
        with pipeline(model, deferred_batch_norm=True) as pipe:
            pipe.step(x, target=y)
        found.append(list(model.buffers()))
    assert all(map(torch.equal, *found))


def test_a_model_with_hooks_of_the_pipeline_can_be_copied() -> None:
    model = norms(0)
    x, y = data(0)
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        other = copy.deepcopy(model)
        other(x)
        assert other.get_buffer("1.num_batches_tracked") == 2
        assert model.get_buffer("1.num_batches_tracked") == 1


def test_without_it_each_microbatch_updates() -> None:
    model = norms(0)
    x, y = data(0)
    with pipeline(model, microbatches=4) as pipe:
        pipe.step(x, target=y)
        assert pipe.get_buffer("1.num_batches_tracked") == 4


def test_half_precision_keeps_its_buffers_types() -> None:
    model = norms(0).bfloat16()
    x, y = (one.bfloat16() for one in data(0))
    with pipeline(model, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        assert pipe.get_buffer("1.running_var").dtype == torch.bfloat16
        assert pipe.get_buffer("1.running_mean").abs().sum() > 0


def test_gpus_do_the_same(gpus: FakeCuda) -> None:
    model = norms(2)
    reference = Reference(model)
    with pipeline(model, devices=["cuda:0", "cuda:1"], deferred_batch_norm=True) as pipe:
        for _ in range(2):
            x, y = data(2)
            pipe.step(x, target=y)
            reference.step(x, y, 3)
            assert_as(pipe, reference)


def test_what_cannot_be_is_refused(gpus: FakeCuda) -> None:
    x, y = data(0, rows=12)
    devices = ["cuda:0", "cuda:1"]
    with pipeline(norms(0), devices=devices, capture=True, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match=r"BatchNorm1d .* has hooks"):
            pipe.step(x, target=y)
    plan = schedules.chimera(2, 4)
    with pytest.raises(ValueError, match="running statistics, which copies would update"):
        pipeline(norms(0), schedule=plan, microbatches=4, deferred_batch_norm=True)


def test_forwards_alone_in_train_mode_update_as_without_it() -> None:
    """A stream of them may have no end."""
    model = norms(0)
    plain = copy.deepcopy(model)
    x, _ = data(0, rows=12)
    with pipeline(model, deferred_batch_norm=True) as pipe, torch.no_grad():
        outputs = [pipe(x), *pipe.stream([x, x])]
    with torch.no_grad():
        expected = [torch.cat([plain(part) for part in x.split(4)]) for _ in range(3)]
    for output, plain_output in zip(outputs, expected, strict=True):
        assert torch.equal(output, plain_output)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


def test_interrupts_leave_a_pipeline_that_goes_on() -> None:
    """Wherever they hit: grad mode, and modules that update again."""
    model = norms(0)
    x, y = data(0)
    interrupted, delays = 0, random.Random(3)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pipeline(model, deferred_batch_norm=True, microbatches=4) as pipe:
            # The first step takes a hundred times as long as those that follow.
            length = min(timeit.repeat(lambda: pipe.step(x, target=y), number=1, repeat=10))
            for _ in range(100):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, length))
                    pipe.step(x, target=y)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
            assert torch.is_grad_enabled()
            pipe.zero_grad()
            reference = Reference(model)
            pipe.step(x, target=y)
            reference.step(x, y, 4)
            assert_as(pipe, reference)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 10
    assert all(module.track_running_stats for module in model if is_norm(module))
