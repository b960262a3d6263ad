"""Steps of pipelines for GPUs, with torch's own engine. Run by test_device_oracle.py."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import LlamaConfig, LlamaForCausalLM

import pykern
from pykern.runtime.gpu.issuing import Issuing
from pykern.schedules import by_name
from tests.device_oracle.oracle import assert_restored, counts, gpus
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.test_recorded import ROWS, example, loss_of
from tests.runtime.test_recorded import plain_step as plain_recorded
from tests.support.plain_step import plain_step
from tests.trace.models import Network

WIDTH = 8
TWO = ["cuda:0", "cuda:1"]
FOUR = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
# All that train in the order of plain steps, but for `seq1f1b`, which cuts sequences.
SCHEDULES = sorted(by_name.keys() - {"forward_only", "pipedream", "pipedream_2bw", "seq1f1b"})


def mlp() -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), *mlp(), nn.Dropout(0.2))


def with_norms() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *mlp())


def assert_steps_are_plain(layers: nn.Sequential, **options: Any) -> None:
    """Bits of a plain loop on the CPU, gradients beside their parameters, no wait of the host."""
    plain = copy.deepcopy(layers)
    x, y = torch.randn(2, 16, WIDTH)
    usual: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with pykern.Pipeline(layers, **(usual | options)) as pipe:
        replicas = pipe.plan.placement.num_replicas
        optimizers = [torch.optim.AdamW(of.parameters(), lr=0.05) for of in (pipe, plain)]
        for number in range(2):
            expected = plain_step(
                plain,
                x,
                y,
                mse_loss,
                pipe.plan.num_microbatches,
                pipe.partition.stages,
                num_replicas=replicas,
            )
            before = counts().host_waits
            loss = pipe.step(x, target=y)
            # In the first step, stages with recompute look at what their layers change.
            assert number == 0 or counts().host_waits == before
            assert_restored(4)
            assert torch.equal(loss.cpu(), expected)
            for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                assert ours.is_cuda
                assert ours.grad is not None
                assert theirs.grad is not None
                assert ours.grad.device == ours.device
                assert torch.equal(ours.grad.cpu(), theirs.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(four_gpus: FakeCuda, schedule: str) -> None:
    assert_steps_are_plain(mlp(), schedule=schedule)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cuda:3"]},
        {"devices": ["cuda:2", "cuda:2"]},
        {"devices": FOUR},
        {"devices": FOUR, "replicas": 2},
        {"recompute": "layer"},
        {"recompute": "stage", "schedule": "zb_h1"},
    ],
    ids=str,
)
def test_devices_and_recompute(four_gpus: FakeCuda, options: dict[str, Any]) -> None:
    assert_steps_are_plain(mlp(), **options)


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("layers", [with_dropout, with_norms])
def test_layers_with_state(
    four_gpus: FakeCuda, layers: Callable[[], nn.Sequential], recompute: str | None
) -> None:
    assert_steps_are_plain(layers(), recompute=recompute)


def test_peers_out_of_reach(four_gpus: FakeCuda) -> None:
    four_gpus.set_peer(0, 1, reachable=False)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 0 to 1"):
        assert_steps_are_plain(mlp())


def test_a_loss_outside(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(layers)
    x_of_gpu = x.to("cuda:0").requires_grad_()
    x.requires_grad_()
    with pykern.Pipeline(layers, devices=TWO, microbatches=4, schedule="gpipe") as pipe:
        for _ in range(2):
            y = pipe(x_of_gpu)
            assert y.device == torch.device("cuda:1")
            y.square().sum().backward()
            torch.cat([plain(part) for part in x.split(4)]).square().sum().backward()
        assert_alike(pipe, plain)
    assert x_of_gpu.grad is not None
    assert x.grad is not None
    assert torch.equal(x_of_gpu.grad.cpu(), x.grad)


def assert_alike(pipe: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"schedule": "chimera"}], ids=str)
def test_outputs_without_gradients(four_gpus: FakeCuda, options: dict[str, Any]) -> None:
    """Replicas end on GPUs of their own."""
    layers, x = mlp(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(layers, devices=FOUR, microbatches=4, **options) as pipe, torch.no_grad():
        expected = torch.cat([plain(part) for part in x.split(4)])
        assert torch.equal(pipe(x).cpu(), expected)


def test_backwards_run_on_the_calling_thread(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    threads: set[int] = set()
    for parameter in layers.parameters():
        parameter.register_hook(lambda _: threads.add(threading.get_ident()))
    with pykern.Pipeline(layers, devices=TWO, microbatches=4, loss_fn=mse_loss) as pipe:
        pipe.step(x, target=x)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("schedule", ["one_f_one_b", "chimera", "zb_h1"])
def test_an_output_that_is_held_costs_waits_and_no_bits(four_gpus: FakeCuda, schedule: str) -> None:
    """Gradients add up on the stream of the graph that is held, which is the caller's."""
    layers, (x, y) = mlp(), torch.randn(2, 16, WIDTH)
    plain = copy.deepcopy(layers)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with pykern.Pipeline(layers, **options, schedule=schedule) as pipe:
        replicas, stages = pipe.plan.placement.num_replicas, pipe.partition.stages

        def waits_of_a_step() -> int:
            before = counts()
            loss = pipe.step(x, target=y)
            now = counts()
            assert now.host_waits == before.host_waits
            expected = plain_step(plain, x, y, mse_loss, 4, stages, num_replicas=replicas)
            assert torch.equal(loss.cpu(), expected)
            assert_alike(pipe, plain)
            return now.waits - before.waits

        assert waits_of_a_step() == 0
        held = pipe(x)
        told = "AccumulateGrad node's stream does not match"
        with warned_always(), pytest.warns(UserWarning, match=told):
            assert waits_of_a_step() > 0
        del held
        assert waits_of_a_step() == 0
        with torch.no_grad():
            held = pipe(x)
        assert waits_of_a_step() == 0
        assert held.is_cuda


def test_an_output_that_is_held_costs_calls_nothing(four_gpus: FakeCuda) -> None:
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(mlp(), devices=TWO, microbatches=4) as pipe:

        def waits_of_a_call() -> int:
            before = counts()
            pipe(x).sum().backward()
            return counts().waits - before.waits

        expected = waits_of_a_call()
        held = pipe(x)
        assert waits_of_a_call() == expected
        del held


@contextmanager
def warned_always() -> Iterator[None]:
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


def test_parameters_of_several_stages(four_gpus: FakeCuda) -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(shared, nn.GELU(), nn.Linear(WIDTH, WIDTH), shared)
    plain = copy.deepcopy(layers)
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(layers, devices=TWO, microbatches=4, loss_fn=mse_loss) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)
            plain_step(plain, x, x, mse_loss, 4)
        assert_alike(pipe, plain)


def test_a_recorded_model_whose_stages_are_on_their_gpus_is_recorded_again(
    four_gpus: FakeCuda,
) -> None:
    """A batch of another form than the sample's, which has values that skip stages."""
    model = Network(num_blocks=4)
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices=FOUR, microbatches=4, loss_fn=loss_of, sample=example(ROWS)
    ) as pipe:
        for masked in (True, False):
            given, target = example(), torch.randn(8)
            given["mask"][:] = not masked
            loss = pipe.step(**given, target=target)
            torch.testing.assert_close(loss.cpu(), plain_recorded(plain, given, target))
        assert_alike(pipe, plain)


class Scaled(nn.Module):
    """Two stages use one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.other(self.one(x) * self.scale) * self.scale
        return scaled


def test_a_buffer_of_two_stages_is_copied_when_it_was_written(four_gpus: FakeCuda) -> None:
    model, x = Scaled(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(model)
    operations = []

    def work() -> int:
        return counts().kernels + counts().host_copies

    with pykern.Pipeline(model, devices=TWO, microbatches=4, sample=x[:4]) as pipe, torch.no_grad():
        for factor in (2.0, None, 3.0, None):
            if factor is not None:
                model.scale.fill_(factor)
                plain.scale.fill_(factor)
            before = work()
            assert torch.equal(pipe(x).cpu(), torch.cat([plain(part) for part in x.split(4)]))
            operations.append(work() - before)
    assert operations[1] == operations[3] < operations[2]


def test_a_model_on_several_gpus_generates(four_gpus: FakeCuda) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (4, 8))
    start, rest = ids[:2, :4], {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(input_ids=start, attention_mask=torch.ones_like(start), **rest)
    sample = {"input_ids": ids[:2], "labels": ids[:2], "use_cache": False}
    with pykern.Pipeline(
        model, devices=FOUR, microbatches=2, loss_fn=lambda out: out["loss"], sample=sample
    ) as pipe:
        pipe.step(input_ids=ids, labels=ids, use_cache=False)
        with pytest.raises(RuntimeError, match="same device"):
            model.generate(input_ids=start, attention_mask=torch.ones_like(start), **rest)
        for device in ("cpu", "cuda:0"):
            there = start.to(device)
            with pykern.on_its_devices(model):
                found = model.generate(
                    input_ids=there, attention_mask=torch.ones_like(there), **rest
                )
            assert found.device == there.device
            assert torch.equal(found.cpu(), expected)
        with pytest.raises(RuntimeError, match="same device"):
            model(input_ids=start, use_cache=False)


def test_loss_scales_and_state_on_the_host(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(layers, devices=TWO, microbatches=4, loss_fn=mse_loss) as pipe:
        optimizer = pykern.HostOptimizer(pipe, torch.optim.AdamW)
        theirs = torch.optim.AdamW(plain.parameters())
        for _ in range(2):
            pipe.step(x, target=x)
            plain_step(plain, x, x, mse_loss, 4)
            assert_alike(pipe, plain)
            for of in (optimizer, theirs):
                of.step()
                of.zero_grad()
        scaler = torch.amp.GradScaler("cuda")
        pipe.step(x, target=x, scaler=scaler)
        plain_step(plain, x, x, mse_loss, 4)
        scaler.unscale_(optimizer)
        assert_alike(pipe, plain)


def test_the_host_waits_for_each_gpu(four_gpus: FakeCuda) -> None:
    with pykern.Pipeline(mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss) as pipe:
        driver: Any = pipe._executor.driver
        before = counts().host_waits
        driver.gpus.mark_for_host().wait()
        assert counts().host_waits == before + len(TWO)


@pytest.mark.parametrize("issue", get_args(Issuing))
def test_the_times_of_a_step(four_gpus: FakeCuda, issue: Issuing) -> None:
    x = torch.randn(16, WIDTH)
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": mse_loss, "issue": issue}
    with pykern.Pipeline(mlp(), devices=TWO, **options) as pipe:
        with pipe.tracing():
            pipe.step(x, target=x)
        assert [len(row) for row in pipe.timeline().rows] == [8, 8]
        assert all(span.end_ns > span.start_ns for row in pipe.copies().rows for span in row)


@pytest.mark.parametrize("issue", get_args(Issuing))
def test_a_wait_that_is_left_out_is_seen(issue: Issuing) -> None:
    """Most are: what a few put in order, others do as well."""
    x = torch.randn(16, WIDTH)
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": mse_loss, "issue": issue}
    seen = 0
    for nth in range(1, 13):
        try:
            with gpus(2) as fake:
                pipe = pykern.Pipeline(mlp(), devices=TWO, **options)
                pipe.step(x, target=x)
                fake.drop_wait(nth)
                pipe.step(x, target=x)
                pipe.close()
        except AssertionError:
            seen += 1
    assert seen >= 6


def test_operations_on_two_devices_are_refused(four_gpus: FakeCuda) -> None:
    one, other, host = (torch.ones(2, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    for wrong in (other, host):
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(one, wrong)
    assert torch.equal(one.to("cuda:1").add(other).cpu(), torch.full((2,), 2.0))


def race() -> None:
    with gpus(1):
        x = torch.ones(4, device="cuda:0")
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)


def test_a_stream_that_does_not_wait_is_seen() -> None:
    with pytest.raises(AssertionError, match="nothing orders the two"):
        race()
