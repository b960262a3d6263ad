"""Microbatches in flight between steps of PipeDream: flush, checkpoints, failures and refusals."""

import copy
import gc
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import pykern
from pykern import checkpoint
from pykern.plan import Kind, simulate
from tests.runtime.async_runs import (
    OPTIMIZERS,
    RULES,
    assert_same,
    batch,
    four,
    layers_of,
    pipeline,
    rules_for,
)


def test_a_pipeline_whose_schedule_updates_nothing_has_nothing_to_flush() -> None:
    with pykern.Pipeline(layers_of(), devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        assert pipe.flush() is None
        assert pipe.optimizer is None


def test_state_and_forwards_are_refused_until_the_flush() -> None:
    x, y = batch()
    with four() as pipe:
        assert pipe(x).shape == y.shape
        pipe.step(x, target=y)
        state = {name: value.clone() for name, value in pipe.named_parameters()}
        for use in (
            lambda: pipe(x),
            lambda: next(pipe.stream([x])),
            pipe.state_dict,
            lambda: pipe.load_state_dict(state),
            lambda: checkpoint.save("never", pipe, pipe.optimizer),
        ):
            with pytest.raises(RuntimeError, match="with microbatches in flight"):
                use()
        assert not Path("never").exists()
        loss = pipe.flush()
        assert isinstance(loss, Tensor)
        assert loss.dim() == 0
        assert not loss.requires_grad
        plain = nn.Sequential(*pipe.children())
        # Microbatch by microbatch: a product may be rounded otherwise with other numbers of rows.
        expected = torch.cat([plain(rows) for rows in x.chunk(4)])
        assert torch.equal(pipe(x), expected)
        (streamed,) = pipe.stream([x])
        assert torch.equal(streamed, expected)
        pipe.load_state_dict(state)


@pytest.mark.parametrize("name", RULES)
def test_a_run_saved_at_a_flush_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    batches = [batch() for _ in range(7)]
    make = OPTIMIZERS["AdamW"]

    def run(pipe: pykern.Pipeline, these: list[tuple[Tensor, Tensor]], rate: StepLR) -> None:
        for x, y in these:
            pipe.step(x, target=y)
            rate.step()
        pipe.flush()

    with pipeline(layers_of(), name, 4, make) as pipe:
        assert pipe.optimizer is not None
        assert type(pipe.optimizer) is torch.optim.AdamW
        rate = StepLR(pipe.optimizer, step_size=2)
        run(pipe, batches[:3], rate)
        checkpoint.save(tmp_path / "run", pipe, pipe.optimizer, scheduler=rate)
        run(pipe, batches[3:], rate)
        with pipeline(layers_of(), name, 4, make) as other:
            assert other.optimizer is not None
            rate = StepLR(other.optimizer, step_size=2)
            checkpoint.load(tmp_path / "run", other, other.optimizer, scheduler=rate)
            run(other, batches[3:], rate)
            for key, value in pipe.state_dict().items():
                assert torch.equal(value, other.state_dict()[key])
            mine, theirs = (each.optimizer.state_dict() for each in (pipe, other))
            assert mine["param_groups"] == theirs["param_groups"]
            for number, values in mine["state"].items():
                for part, value in values.items():
                    assert torch.equal(value, theirs["state"][number][part])


def test_a_run_goes_on_without_updates_in_the_step_on_other_stages(tmp_path: Path) -> None:
    layers, make = layers_of(), OPTIMIZERS["SGD"]
    x, y = batch()
    with pipeline(layers, "pipedream", 4, make) as pipe:
        pipe.step(x, target=y)
        pipe.flush()
        checkpoint.save(tmp_path / "run", pipe, pipe.optimizer)
    other = layers_of()
    with pykern.Pipeline(other, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        optimizer = make(list(pipe.parameters()))
        checkpoint.load(tmp_path / "run", pipe, optimizer)
        pipe.step(x, target=y)
        optimizer.step()
    plain = make(list(layers.parameters()))
    checkpoint.load(tmp_path / "run", layers, plain)
    for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(layers(x_part), y_part) / 2).backward()
    plain.step()
    for mine, theirs in zip(other.parameters(), layers.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_rate_of_a_scheduler_is_that_of_all_stages_and_hooks_see_each_update() -> None:
    layers = layers_of(2)
    seen: list[float] = []
    x, y = batch()
    with pipeline(layers, "pipedream", 2, OPTIMIZERS["SGD"]) as pipe:
        assert pipe.optimizer is not None
        rate = StepLR(pipe.optimizer, step_size=1, gamma=0.5)
        pipe.optimizer.register_step_post_hook(
            lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
        )
        pipe.step(x, target=y)
        rate.step()
        pipe.step(x, target=y)
        pipe.flush()
    # Microbatches of stages: the last stage has made both updates of the first batch by then.
    assert len(seen) == 2 * 4
    assert set(seen) == {0.02, 0.01}


def test_hooks_of_parameters_see_the_gradient_of_each_update() -> None:
    layers = layers_of(2)
    weight = layers[0].weight
    assert isinstance(weight, nn.Parameter)
    seen: list[Tensor] = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))

    def clear(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    weight.register_post_accumulate_grad_hook(clear)
    before = weight.detach().clone()

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    with pipeline(layers, "pipedream", 2, make) as pipe:
        x, y = batch(4)
        pipe.step(x, target=y)
        pipe.flush()
    assert len(seen) == 2
    assert all(gradient.abs().sum() > 0 for gradient in seen)
    assert torch.equal(weight, before)


class Fails(nn.Module):
    """Raises when told to, in a forward or in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.on: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self._count("forward")
        y = self.linear(x)
        y.register_hook(lambda _: self._count("backward"))
        return y

    def _count(self, what: str) -> None:
        if what in self.on:
            self.on[what] -= 1
            if self.on[what] < 0:
                raise ArithmeticError(what)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_failure_drops_what_is_in_flight_and_the_next_step_begins_anew(
    what: str, steps: int
) -> None:
    fails = Fails()
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), fails, nn.Linear(4, 4))
    x, y = batch()
    with four(layers) as pipe:
        for _ in range(steps):
            pipe.step(x, target=y)
        fails.on[what] = 1
        with pytest.raises(ArithmeticError, match=what) as caught:
            pipe.step(x, target=y)
        notes = "\n".join(caught.value.__notes__)
        assert "raised in stage 2, microbatch" in notes
        assert "Resume from the last checkpoint" in notes
        del caught
        fails.on.clear()
        assert pipe.flush() is None
        # All that the next steps depend on are weights and state as they are.
        rules = rules_for(layers, "pipedream", 1, OPTIMIZERS["SGD"])
        assert pipe.optimizer is not None
        rules.optimizer.load_state_dict(copy.deepcopy(pipe.optimizer.state_dict()))
        for _ in range(3):
            x, y = batch()
            rules.batch(x, y, [2] * 4)
            pipe.step(x, target=y)
        pipe.flush()
        assert_same(pipe, rules)


class Interrupted(nn.Linear):
    """Has Ctrl-C come while it runs, when told to."""

    now = False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            signal.raise_signal(signal.SIGINT)
            for _ in range(2000):
                time.sleep(0.01)
        return super().forward(x)


def test_an_interrupt_drops_what_is_in_flight_too() -> None:
    layer = Interrupted(4, 4)
    layers = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 4))
    x, y = batch()
    with four(layers) as pipe:
        pipe.step(x, target=y)
        layer.now = True
        with pytest.raises(KeyboardInterrupt):
            pipe.step(x, target=y)
        layer.now = False
        assert pipe.flush() is None
        rules = rules_for(layers, "pipedream", 1, OPTIMIZERS["SGD"])
        assert pipe.optimizer is not None
        rules.optimizer.load_state_dict(copy.deepcopy(pipe.optimizer.state_dict()))
        for _ in range(2):
            rules.batch(x, y, [2] * 4)
            pipe.step(x, target=y)
        pipe.flush()
        assert_same(pipe, rules)


def test_a_failure_in_an_earlier_batch_says_so() -> None:
    fails = Fails()
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), fails)
    with four(layers) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        # The first that the last stage has left of that batch.
        fails.on["forward"] = 0
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(x, target=y)
        notes = "\n".join(caught.value.__notes__)
        assert "raised in the batch of 1 steps before" in notes
        assert "raised in stage 3, microbatch 3, action 3F3, device 3" in notes


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen.add(y)
        return y


def test_closing_drops_what_is_in_flight_and_a_flush_leaves_no_tensor() -> None:
    for close in (False, True):
        watched = Tensors()
        pipe = four(nn.Sequential(watched, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
        x, y = batch()
        pipe.step(x, target=y)
        assert watched.seen
        if close:
            pipe.close()
        else:
            pipe.flush()
        gc.collect()
        assert not watched.seen
        pipe.close()


def test_what_has_run_is_told_of_each_step_and_the_flush() -> None:
    x, y = batch()
    with four() as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        ran = [[span.action.kind for span in row] for row in pipe.timeline().rows]
        assert all(row.count(Kind.F) == row.count(Kind.B) == row.count(Kind.U) == 4 for row in ran)
        with pytest.raises(RuntimeError, match="simulate"):
            pipe.prediction()
        assert simulate(pipe.plan, pipe.costs()).makespan_ns > 0
        pipe.flush()
        ran = [[span.action.kind for span in row] for row in pipe.timeline().rows]
        assert ran[0].count(Kind.F) == 0
        assert ran[0].count(Kind.B) == 3
        pipe(x)
        assert pipe.prediction().makespan_ns > 0


def test_a_batch_that_cannot_be_cut_changes_nothing() -> None:
    layers = layers_of()
    rules = rules_for(layers, "pipedream", 1, OPTIMIZERS["SGD"])
    with four(layers) as pipe:
        for number in range(4):
            x, y = batch()
            rules.batch(x, y, [2] * 4)
            pipe.step(x, target=y)
            if number == 1:
                with pytest.raises(ValueError, match="rows"):
                    pipe.step(x, target=y[1:])
                with pytest.raises(TypeError, match=r"got mask=\. Omit mask"):
                    pipe.step(x, target=y, mask=x)
                with pytest.raises(
                    ValueError, match="scaler must be None in steps of AsyncPipeline"
                ):
                    pipe.step(x, target=y, scaler=torch.amp.GradScaler("cpu"))
                with (
                    torch.no_grad(),
                    pytest.raises(
                        RuntimeError,
                        match=r"grad mode must be on in flush, got off",
                    ),
                ):
                    pipe.flush()
        pipe.flush()
        assert_same(pipe, rules)


def test_modes_may_not_change_under_microbatches_in_flight() -> None:
    x, y = batch()
    with four() as pipe:
        pipe.step(x, target=y)
        pipe.eval()
        with pytest.raises(RuntimeError, match=r"train\(\) or eval\(\) was called"):
            pipe.flush()
        pipe.train()
        pipe.flush()
        pipe.eval()
        pipe(x)


def test_weights_may_not_be_written_under_microbatches_in_flight() -> None:
    x, y = batch()
    layers = layers_of()
    with four(layers) as pipe:
        pipe.step(x, target=y)
        with torch.no_grad():
            layers[0].get_parameter("weight").mul_(2)
        with pytest.raises(RuntimeError, match="a parameter was written with microbatches"):
            pipe.step(x, target=y)
        # They are dropped, and the pipeline goes on.
        assert pipe.flush() is None
        pipe.step(x, target=y)
        pipe.flush()
        with torch.no_grad():
            layers[0].get_parameter("weight").mul_(2)
        pipe.step(x, target=y)


def test_stages_may_not_come_to_share_weights() -> None:
    x, y = batch()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    with four(layers) as pipe:
        pipe.step(x, target=y)
        pipe.flush()
        layers[2]._modules["0"] = layers[1]._modules["0"]
        with pytest.raises(
            RuntimeError,
            match="stage 2 must keep parameters and modules of its own, got one that an earlier "
            "stage has by now, of which both would have versions",
        ):
            pipe.step(x, target=y)
