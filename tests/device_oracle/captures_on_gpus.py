"""Graph mode with torch's own engine and captures. Run by test_device_oracle.py."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern
from pykern.runtime.gpu.cuda import Gpus
from tests.device_oracle.library import Counts
from tests.device_oracle.oracle import assert_restored, counts, gpus
from tests.device_oracle.steps_on_gpus import FOUR, SCHEDULES, TWO, WIDTH, mlp
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES
from tests.runtime.test_capture_seeds import Drop
from tests.runtime.test_recorded import ROWS as ROWS_OF_EXAMPLE
from tests.runtime.test_recorded import example, loss_of
from tests.runtime.test_recorded import plain_step as plain_recorded
from tests.support.plain_step import plain_step
from tests.trace.models import Network

# Replicas, and backwards of which some are split.
REFUSED_SCHEDULES = {"chimera", "dualpipe_v"}


def since(before: Counts) -> Counts:
    return Counts(*(now - then for now, then in zip(counts(), before, strict=True)))


def assert_alike(pipe: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.device == ours.device
            assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())


def assert_replays_are_plain(fake: FakeCuda, layers: nn.Sequential, **options: Any) -> None:
    """The first step is called, the second captures; replays have new values, and no new work.

    A replay issues launches, and copies of the batch and of gradients; no layer of the model.
    """
    plain = copy.deepcopy(layers)
    usual: dict[str, Any] = {
        "devices": TWO,
        "microbatches": 4,
        "loss_fn": mse_loss,
        "capture": True,
    }
    with pykern.Pipeline(layers, **(usual | options)) as pipe:
        optimizers = [torch.optim.AdamW(of.parameters(), lr=0.05) for of in (pipe, plain)]
        for number in range(5):
            x, y = torch.randn(2, 16, WIDTH)
            expected = plain_step(plain, x, y, mse_loss, 4, pipe.partition.stages)
            launches, before = fake.calls("cuGraphLaunch"), counts()
            loss = pipe.step(x, target=y)
            launched, did = fake.calls("cuGraphLaunch") - launches, since(before)
            assert torch.equal(loss.cpu(), expected)
            assert_restored(4)
            assert_alike(pipe, plain)
            assert did.host_waits == 0 or number == 0
            assert (did.captures > 0) == (number == 1)
            assert (launched > 0) == (did.replayed > 0) == (number > 0)
            # All of a stage's actions are on its stream, and what orders them is pykern's alone.
            assert did.forks == did.records == did.waits == 0 or number == 0
            if number > 1:
                assert did.kernels <= 3 + 2 * len(list(pipe.parameters()))
            if number % 2 == 1:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number == 1)


@pytest.mark.parametrize("capture", [True, "step"])
@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - REFUSED_SCHEDULES))
def test_schedules(four_gpus: FakeCuda, schedule: str, capture: Any) -> None:
    assert_replays_are_plain(four_gpus, mlp(), schedule=schedule, capture=capture)


@pytest.mark.parametrize("capture", [True, "step"])
@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cuda:3"]},
        {"devices": ["cuda:2", "cuda:2"]},
        {"devices": "cuda:1/2", "schedule": "zb_h1"},
        {"devices": FOUR},
        {"recompute": "layer"},
        {"recompute": "stage", "schedule": "zb_h1"},
        {"devices": FOUR, "recompute": "layer"},
        {"devices": FOUR, "recompute": "stage", "schedule": "zb_h1"},
    ],
    ids=str,
)
def test_devices_and_recompute(four_gpus: FakeCuda, options: dict[str, Any], capture: Any) -> None:
    assert_replays_are_plain(four_gpus, mlp(), **options, capture=capture)


@pytest.mark.parametrize("capture", [True, "step"])
@pytest.mark.parametrize("name", ["cnn", "frozen", "recurrent", "structured"])
def test_replays_have_the_bits_of_calls(four_gpus: FakeCuda, name: str, capture: Any) -> None:
    """The CPU rounds some kernels otherwise for tensors of GPUs than for a plain model's."""
    case = CASES[name](16)
    other = copy.deepcopy(case.layers)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": case.loss_fn}
    with (
        pykern.Pipeline(case.layers, **options, capture=capture) as pipe,
        pykern.Pipeline(other, **options) as calls,
    ):
        for number in range(4):
            x, y = case.inputs.roll(number, 0), case.target.roll(number, 0)
            assert torch.equal(pipe.step(x, target=y), calls.step(x, target=y))
            for ours, theirs in zip(pipe.parameters(), calls.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None and theirs.grad is not None:
                    assert torch.equal(ours.grad, theirs.grad)
        assert four_gpus.calls("cuGraphLaunch") > 0


def test_peers_out_of_reach(four_gpus: FakeCuda) -> None:
    four_gpus.set_peer(0, 1, reachable=False)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 0 to 1"):
        assert_replays_are_plain(four_gpus, mlp())


@pytest.mark.parametrize("capture", [True, "step"])
def test_a_recorded_model(four_gpus: FakeCuda, capture: Any) -> None:
    model = Network(num_blocks=4)
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model,
        devices=FOUR,
        microbatches=4,
        loss_fn=loss_of,
        sample=example(ROWS_OF_EXAMPLE),
        capture=capture,
    ) as pipe:
        for _ in range(3):
            given, target = example(), torch.randn(8)
            loss = pipe.step(**given, target=target)
            torch.testing.assert_close(loss.cpu(), plain_recorded(plain, given, target))
        assert four_gpus.calls("cuGraphLaunch") > 0


def test_dropout_and_loss_scales_are_replayed(four_gpus: FakeCuda) -> None:
    """A replay has the masks and the scaled gradients that a called step has from there on."""
    drop = nn.Sequential(nn.Linear(WIDTH, WIDTH), Drop(WIDTH), *mlp(), Drop(WIDTH))
    other = copy.deepcopy(drop)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with (
        pykern.Pipeline(drop, **options, capture=True) as pipe,
        pykern.Pipeline(other, **options) as calls,
    ):
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**7) for _ in range(2)]
        for number in range(4):
            x, y = torch.randn(2, 16, WIDTH)
            both = []
            for one, scaler in zip((pipe, calls), scalers, strict=True):
                torch.manual_seed(number)
                both.append(one.step(x, target=y, scaler=scaler).cpu())
            assert torch.equal(*both)
            assert_alike(pipe, calls)
            for one in (pipe, calls):
                one.zero_grad()
        assert four_gpus.calls("cuGraphLaunch") > 0


def replays(num_waits: int, capture: Any) -> None:
    """Two steps, and a replay in which the nth wait is left out."""
    x = torch.randn(16, WIDTH)
    with gpus(2) as fake:
        pipe = pykern.Pipeline(
            mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss, capture=capture
        )
        for _ in range(2):
            pipe.step(x, target=x)
        fake.drop_wait(num_waits)
        pipe.step(x, target=x)
        pipe.close()


def test_a_wait_that_is_left_out_of_a_replay_is_seen() -> None:
    seen = 0
    for nth in range(1, 13):
        try:
            replays(nth, capture=True)
        except AssertionError:
            seen += 1
    assert seen >= 6


def test_slots_that_share_memory_are_seen(
    four_gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward of one slot would write to what a forward of another has kept."""
    monkeypatch.setattr(Gpus, "pool", lambda _: (0, 1 << 32))
    with pytest.raises(AssertionError, match=r"torch\.equal"):
        assert_replays_are_plain(four_gpus, mlp())


def streams(num: int) -> list[Any]:
    return [torch.cuda.Stream(0) for _ in range(num)]


def captured(stream: Any, run: Callable[[], object]) -> Any:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    # torch leaves the stream current if the capture fails.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def test_a_replay_computes_with_new_values(four_gpus: FakeCuda) -> None:
    (stream,) = streams(1)
    x, results = torch.ones(4, device="cuda:0"), []
    graph = captured(stream, lambda: results.append((x * 3).add_(1)))
    assert results[0].isnan().all()
    for value in (1.0, 2.0):
        x.fill_(value)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        assert results[0].tolist() == [value * 3 + 1] * 4
    torch.cuda.synchronize()


def forked(*, there: bool, back: bool) -> None:
    """A capture of two streams, each of which waits for the other if told to."""
    one, other = streams(2)
    x = torch.ones(4, device="cuda:0")

    def run() -> None:
        other.wait_stream(one)
        x.add_(1)
        if there:
            other.wait_stream(one)
        with torch.cuda.stream(other):
            x.mul_(2)
        if back:
            one.wait_stream(other)

    graph = captured(one, run)
    with torch.cuda.stream(one):
        graph.replay()
    torch.cuda.synchronize()
    assert not there or x.tolist() == [4] * 4


def test_a_wait_that_is_left_out_of_a_capture_is_seen() -> None:
    with gpus(1):
        forked(there=True, back=True)
        with pytest.raises(RuntimeError, match="unjoined work"):
            forked(there=True, back=False)
    with pytest.raises(AssertionError, match="race in a graph"), gpus(1):
        forked(there=False, back=True)


def test_a_capture_does_not_wait_for_work_before_it(four_gpus: FakeCuda) -> None:
    stream, other = streams(2)
    event = other.record_event()
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(stream, lambda: stream.wait_event(event))
    assert "waits for work that is not captured" in str(raised.value.__context__)


def test_the_default_stream_does_not_wait_for_a_capture(four_gpus: FakeCuda) -> None:
    (stream,) = streams(1)
    default = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(stream, lambda: default.wait_event(stream.record_event()))
    assert "the default stream, which no graph has, waits" in str(raised.value.__context__)


def freed(*, waits: bool) -> None:
    """A graph on another stream reads a tensor, whose memory is then another's."""
    (stream,) = streams(1)
    x = [torch.ones(4, device="cuda:0")]
    graph = captured(stream, lambda: x[0] * 2)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    x.clear()
    torch.zeros(4, device="cuda:0")
    torch.cuda.synchronize()


def test_a_tensor_that_is_freed_while_a_replay_of_another_stream_reads_it_is_seen() -> None:
    with gpus(1):
        freed(waits=True)
    with pytest.raises(AssertionError, match="nothing orders the two"), gpus(1):
        freed(waits=False)


def lent(*, recorded: bool) -> None:
    with gpus(1):
        (stream,) = streams(1)
        x = torch.ones(4, device="cuda:0")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.sum()
        if recorded:
            x.record_stream(stream)
        del x
        torch.zeros(4, device="cuda:0")


def test_memory_that_another_stream_uses_is_not_free() -> None:
    lent(recorded=True)
    with pytest.raises(AssertionError, match="nothing orders the two"):
        lent(recorded=False)


def test_graphs_go_with_their_pipeline(four_gpus: FakeCuda) -> None:
    """`gpus` asserts that no graph is left."""
    x = torch.randn(16, WIDTH)
    pipe = pykern.Pipeline(mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss, capture="step")
    for _ in range(2):
        pipe.step(x, target=x)
    assert four_gpus.leaks
    pipe.close()
    del pipe
    gc.collect()
