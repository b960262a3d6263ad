"""Steps issued by a thread for each GPU, with torch's engine. Run by test_device_oracle.py."""

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

import pykern
from pykern.kineto.chrome_trace import events_of
from pykern.runtime.gpu import streams
from tests.device_oracle.oracle import counts
from tests.device_oracle.steps_on_gpus import (
    FOUR,
    SCHEDULES,
    TWO,
    WIDTH,
    assert_alike,
    assert_steps_are_plain,
    mlp,
    with_dropout,
    with_norms,
)
from tests.fake_cuda.fake import FakeCuda
from tests.support.plain_step import plain_step


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", [TWO, FOUR], ids=len)
def test_schedules(four_gpus: FakeCuda, schedule: str, devices: list[str]) -> None:
    assert_steps_are_plain(
        mlp(), schedule=schedule, devices=devices, microbatches=8, issue="threads"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cuda:3"]},
        {"devices": ["cuda:2", "cuda:2"]},
        {"devices": ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]},
        {"devices": FOUR, "replicas": 2},
        {"devices": FOUR, "replicas": 4},
        {"recompute": "layer"},
        {"recompute": "stage", "schedule": "zb_h1"},
        {"timeout": 60.0},
    ],
    ids=str,
)
def test_devices_and_options(four_gpus: FakeCuda, options: dict[str, Any]) -> None:
    assert_steps_are_plain(mlp(), **options, issue="threads")


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("layers", [with_dropout, with_norms])
@pytest.mark.parametrize("devices", [TWO, ["cuda:1", "cuda:1"]], ids=str)
def test_layers_with_state(
    four_gpus: FakeCuda,
    layers: Callable[[], nn.Sequential],
    recompute: str | None,
    devices: list[str],
) -> None:
    assert_steps_are_plain(layers(), recompute=recompute, devices=devices, issue="threads")


def test_peers_out_of_reach(four_gpus: FakeCuda) -> None:
    four_gpus.set_peer(0, 1, reachable=False)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 0 to 1"):
        assert_steps_are_plain(mlp(), issue="threads")


def test_the_thread_of_a_device_calls_its_actions(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    threads: dict[int, set[int]] = {}

    def notice(stage: int) -> Callable[[Tensor], None]:
        return lambda _: threads.setdefault(stage, set()).add(threading.get_ident())

    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_hook(notice(number // 4))
    with pykern.Pipeline(
        layers, devices=TWO, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)
    assert [len(of) for of in threads.values()] == [1, 1]
    assert len({threading.get_ident(), *threads[0], *threads[1]}) == 3


@pytest.mark.parametrize("all_threads", [False, True], ids=["the caller", "all threads"])
def test_a_profile_has_what_the_recorded_threads_issue(
    four_gpus: FakeCuda, tmp_path: Path, all_threads: bool
) -> None:
    """The caller tells nothing of the others: their issue has no times of actions."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(
        mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        pipe.step(x, target=x)
        # torch 2.11 warns where it is not told what becomes of a cycle's events.
        kinds = [ProfilerActivity.CPU]
        with profile(activities=kinds, experimental_config=config, acc_events=True) as recorded:
            pipe.step(x, target=x)
    recorded.export_chrome_trace(str(tmp_path / "step.json"))
    ranges = [
        event for event in events_of(tmp_path / "step.json") if event.name.startswith("pykern ")
    ]
    devices = {(event.name.rpartition(" dev")[2], event.thread) for event in ranges}
    if all_threads:
        # Sixteen actions, eight copies and the step, whose thread no device has.
        assert len(ranges) == 16 + 8 + 1
        assert len(devices) == 3
    else:
        assert [event.name for event in ranges] == ["pykern step"]


def names_of_threads() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [task.joinpath("comm").read_text(encoding="utf-8").strip() for task in tasks]


@pytest.mark.parametrize("closed", [True, False])
def test_threads_end_with_their_pipeline(four_gpus: FakeCuda, closed: bool) -> None:
    x = torch.randn(16, WIDTH)
    pipe = pykern.Pipeline(mlp(), devices=FOUR, microbatches=4, loss_fn=mse_loss, issue="threads")
    pipe.step(x, target=x)
    assert sum(name.startswith("pykern dev") for name in names_of_threads()) == 4
    if closed:
        pipe.close()
    else:
        del pipe
        gc.collect()
    assert not any(name.startswith("pykern dev") for name in names_of_threads())


def test_a_loss_outside(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(layers, devices=TWO, microbatches=4, issue="threads") as pipe:
        for _ in range(2):
            pipe(x).square().sum().backward()
            torch.cat([plain(part) for part in x.split(4)]).square().sum().backward()
        assert_alike(pipe, plain)


def test_optimizer_state_on_the_host(four_gpus: FakeCuda) -> None:
    layers, x = mlp(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(layers)
    devices = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    with pykern.Pipeline(
        layers, devices=devices, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        optimizers = [
            pykern.HostOptimizer(pipe, torch.optim.AdamW),
            torch.optim.AdamW(plain.parameters()),
        ]
        for _ in range(3):
            pipe.step(x, target=x)
            plain_step(plain, x, x, mse_loss, 4)
            assert_alike(pipe, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_streams_of_batches(four_gpus: FakeCuda) -> None:
    layers = mlp()
    plain = copy.deepcopy(layers)
    batches = [torch.randn(8, WIDTH) for _ in range(5)]
    with pykern.Pipeline(layers, devices=FOUR, microbatches=4, issue="threads") as pipe:
        for x, y in zip(batches, pipe.stream(batches), strict=True):
            with torch.no_grad():
                assert torch.equal(y.cpu(), torch.cat([plain(part) for part in x.split(2)]))


class Fails(nn.Module):
    """Raises an error of the type that it is given, once."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        raised, self.raises = self.raises, None
        if raised is not None:
            raise raised()
        return x


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_fails(four_gpus: FakeCuda, error: type[BaseException], stage: int) -> None:
    fails = Fails()
    layers, x = mlp(), torch.randn(16, WIDTH)
    layers.insert(4 * stage, fails)
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(
        layers, devices=TWO, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        pipe.step(x, target=x)
        pipe.zero_grad()
        fails.raises = error
        with pytest.raises(error):
            pipe.step(x, target=x)
        pipe.zero_grad()
        pipe.step(x, target=x)
        plain_step(plain, x, x, mse_loss, 4)
        assert_alike(pipe, plain)


def test_the_driver_fails(four_gpus: FakeCuda) -> None:
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(
        mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        pipe.step(x, target=x)
        four_gpus.fail("cuMemcpyAsync", 3, 2)
        with pytest.raises(RuntimeError, match="cuMemcpyAsync"):
            pipe.step(x, target=x)
        assert torch.isfinite(pipe.step(x, target=x)).cpu()


def test_a_copy_that_hangs_is_named(four_gpus: FakeCuda) -> None:
    # No copy of the batch, for which the host would wait.
    x, y = (torch.randn(16, WIDTH, device=device) for device in TWO)
    pipe = pykern.Pipeline(
        mlp(), devices=TWO, microbatches=4, loss_fn=mse_loss, issue="threads", timeout=2.0
    )
    pipe.step(x, target=y)
    driver: Any = pipe._executor.driver
    driver.gpus.synchronize()
    four_gpus.hang("cuMemcpyAsync", 2)
    pipe.step(x, target=y)
    with pytest.raises(pykern.PipelineStalled, match=r"action \dCOPY_[FB]\d, device \d has not"):
        driver.gpus.synchronize()
    with pytest.warns(UserWarning, match="has stalled on a GPU"):
        pipe.close()
    four_gpus.let_go()
    streams._leaked.clear()


def test_the_host_does_not_wait(four_gpus: FakeCuda) -> None:
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(
        mlp(), devices=FOUR, microbatches=4, loss_fn=mse_loss, issue="threads"
    ) as pipe:
        pipe.step(x, target=x)
        before = counts().host_waits
        pipe.step(x, target=x)
        assert counts().host_waits == before
