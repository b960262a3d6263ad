"""Work on a GPU that hangs, planted on the fake driver: what is told, and what is left behind."""

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.runtime.gpu import streams
from pykern.runtime.gpu.streams import Streams
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import host_gpus
from tests.support.threads import threads

TIMEOUT = 1.0
BATCH = torch.ones(12, 4)
NUM_MICROBATCHES = 6
SCHEDULES: dict[str, dict[str, Any]] = {
    "one_f_one_b": {},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2},
    "zb_h1": {"schedule": "zb_h1"},
}
Plant = Callable[[FakeCuda], object]


class Planted(nn.Module):
    """Calls `plant` in its forward of microbatch 3, once it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plant: Callable[[], object] | None = None
        self.calls = 0
        self.hooked = False
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.plant is not None:
            if self.fails:
                1 / 0  # noqa: B018 - that it raises is all that matters
            if self.calls == 3 and self.hooked:
                y.register_hook(lambda _: self.plant())
            elif self.calls == 3:
                self.plant()
            self.calls += 1
        return y


class Run:
    """A pipeline on four GPUs, with the layer of stage 2, that has run some steps."""

    def __init__(self, fake: FakeCuda, pipe: pykern.Pipeline, layer: Planted) -> None:
        self.fake, self.pipe, self.layer = fake, pipe, layer

    def step(self) -> Tensor:
        return self.pipe.step(BATCH, target=BATCH)

    def stall(self, plant: Plant) -> None:
        """Runs the step whose stage 2 plants in microbatch 3."""
        self.layer.plant = lambda: plant(self.fake)
        self.step()
        self.layer.plant = None

    @property
    def driver(self) -> Streams:
        driver = self.pipe._executor.driver
        assert isinstance(driver, Streams)
        return driver


@contextmanager
def running(timeout: float | None = TIMEOUT, steps: int = 1, **options: Any) -> Iterator[Run]:
    """In the end nothing is left running, and no rule is broken."""
    layer = Planted()
    arguments = {"schedule": "one_f_one_b"} | options
    num_stages = 4 * arguments.get("num_chunks", 1)
    layers = [nn.Linear(4, 4) for _ in range(num_stages)]
    with host_gpus(4) as fake:
        pipe = pykern.Pipeline(
            [*layers[:2], layer, *layers[3:]],
            devices=[f"cuda:{gpu}" for gpu in range(4)],
            microbatches=NUM_MICROBATCHES,
            loss_fn=F.mse_loss,
            # The first step may take long, because much is loaded.
            timeout=timeout,
            **arguments,
        )
        run = Run(fake, pipe, layer)
        try:
            for _ in range(steps):
                run.step()
            yield run
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pipe.close()
            assert not threads("pykern streams")
            fake.let_go()
            streams._leaked.clear()
            del pipe, run.pipe
    layer.plant = None


def told(capfd: pytest.CaptureFixture[str]) -> str:
    """The text on stderr, which comes soon after the timeout."""
    begin, text = time.monotonic(), ""
    while "SIGQUIT" not in text:
        assert time.monotonic() < begin + TIMEOUT + 1, text
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text


def refusal(call: Callable[[], object]) -> str:
    """The report that a call raises. Its frames, which hold the pipeline, are let go."""
    with pytest.raises(pykern.PipelineStalled) as caught:
        call()
    return str(caught.value)


CALLS: list[Callable[[Run], object]] = [
    Run.step,
    lambda run: run.pipe(BATCH),
    lambda run: list(run.pipe.stream([BATCH])),
    # Before the batch is copied, since a copy from pageable memory would wait.
    lambda run: run.pipe._executor.replicas.place(((BATCH,), {}), None),
]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """The first step loads much, which may take longer than the timeout."""
    with running(timeout=None) as run:
        run.stall(lambda _: None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kernel_that_hangs_is_named(schedule: str, capfd: pytest.CaptureFixture[str]) -> None:
    with running(**SCHEDULES[schedule]) as run:
        run.stall(lambda fake: fake.hang("fake_kernel"))
        text = told(capfd)
        assert text.startswith("pykern: stage 2, microbatch 3, action 2F3, device 2 has not ended")
        assert re.search(
            r'\nstream "pykern dev2 compute" is in 2F3 for 1\.\d s: kernels of Python code were '
            r"issued, and the event behind has not come; issued last: 2[BIW]\d\n"
            if schedule != "interleaved"
            else r'\nstream "pykern dev2 compute" is in 2F3 for .*; issued last: [26][BW]\d\n',
            text,
        )
        assert (
            'stream "pykern dev2 > dev3 F" waits for the event behind 2F3 on stream "pykern dev2 '
            'compute", to go on with 2COPY_F3; issued last: ' in text
        )
        assert "\nthe issuing thread has issued all of the step\n" in text
        for call in CALLS:
            assert refusal(partial(call, run)) in text


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_a_backward_that_hangs_is_named(schedule: str, capfd: pytest.CaptureFixture[str]) -> None:
    with running(**SCHEDULES[schedule]) as run:
        run.layer.hooked = True
        run.stall(lambda fake: fake.hang("fake_kernel"))
        kind = "I" if schedule == "zb_h1" else "B"
        assert f"pykern: stage 2, microbatch 3, action 2{kind}3, device 2 has" in told(capfd)


def test_a_copy_that_hangs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as run:
        run.stall(lambda fake: fake.hang("cuMemcpyAsync"))
        text = told(capfd)
        # The first copy issued behind 2F3, which 2F3 does not wait for.
        found = re.match(
            r"pykern: stage (\d), microbatch (\d), action \1COPY_(F|B)\2, device ", text
        )
        assert found is not None, text
        stage, microbatch, way = found.groups()
        other = int(stage) + (1 if way == "F" else -1)
        assert re.search(
            rf'\nstream "pykern dev{stage} > dev{other} {way}" is in {stage}COPY_{way}{microbatch} '
            r"for 1\.\d s: a copy of 32 bytes was issued, and the event behind has not come",
            text,
        )


def test_a_wait_that_never_comes_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as run:
        run.stall(lambda fake: fake.hang("cuStreamWaitEvent"))
        assert re.match(r"pykern: stage \d, microbatch \d, action \d(COPY_)?[FB]\d, ", told(capfd))


def test_an_event_of_the_user_that_never_comes_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def wait(fake: FakeCuda) -> None:
        other = fake.stream(2)
        fake.hang("fake_kernel")
        fake.kernel(other)
        fake.order(other, run.driver.gpus.lanes.compute(2))

    with running() as run:
        run.stall(wait)
        assert "pykern: stage 2, microbatch 3, action 2F3, device 2 has not ended" in told(capfd)


def test_work_before_the_step_that_hangs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as run:
        run.fake.hang("fake_kernel")
        run.fake.kernel(run.fake.default_stream(2))
        run.step()
        text = told(capfd)
        assert text.startswith("pykern: work before the step has not ended for 1.")
        assert (
            "\nthe step waits for 1.0 s for work that torch's current stream held before the step, "
            "on device 2 (GPU 2)\n" in re.sub(r"1\.\d s", "1.0 s", text)
        )
        assert refusal(run.step) in text


def test_a_stage_that_keeps_the_calling_thread_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as run:
        # The step that hangs ends when its stage returns.
        report = refusal(lambda: run.stall(lambda _: time.sleep(TIMEOUT + 0.7)))
        assert report.startswith("stage 2, microbatch 3, action 2F3, device 2 has not ended for 1.")
        assert (
            "\nthe issuing thread is in stage 2, microbatch 3, action 2F3, device 2 for" in report
        )
        assert report in told(capfd)


@pytest.mark.parametrize("nth", [1, 9])
def test_a_graph_that_hangs_is_named(nth: int, capfd: pytest.CaptureFixture[str]) -> None:
    with running(steps=3, capture=True) as run:
        run.fake.hang("cuGraphLaunch", nth)
        run.step()
        text = told(capfd)
        where = "stage 0, microbatch 0, action 0F0" if nth == 1 else "stage "
        assert text.startswith(f"pykern: {where}")
        assert re.search(
            r"is in \d[FB]\d for 1\.\d s: a CUDA graph (and copies of \d+ bytes )?w", text
        )
        assert refusal(run.step) in text


@pytest.mark.parametrize("nth", [1, 30, 60])
def test_an_action_that_hangs_in_a_graph_of_the_step_is_named(
    nth: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(steps=3, capture="step") as run:
        run.fake.hang_node(nth)
        run.step()
        text = told(capfd)
        named = re.match(
            r"pykern: stage (\d), microbatch (\d), action (\1(?:COPY_)?[FB]\2), device (\d)", text
        )
        assert named is not None, text
        assert nth > 1 or named[3] == "0F0"
        assert re.search(
            rf'\nstream "pykern dev{named[4]} .*" is in {named[3]} for 1\.\d s: a', text
        )
        assert "\nthe issuing thread has issued all of the step, as one CUDA graph\n" in text
        for call in CALLS:
            assert refusal(partial(call, run)) in text


def test_a_graph_of_the_step_that_hangs_at_once_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with running(steps=3, capture="step") as run:
        run.fake.hang("cuGraphLaunch")
        run.step()
        assert told(capfd).startswith("pykern: stage 0, microbatch 0, action 0F0, device 0 has")


def test_a_close_gives_up_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as run:
        run.stall(lambda fake: fake.hang("fake_kernel"))
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="graphs, streams and events are not freed before"):
            run.pipe.close()
        assert time.monotonic() - begin < TIMEOUT + 1
        assert "action 2F3" in told(capfd)
        assert "action 2F3" in refusal(run.step)


WAITS: list[Callable[[Run], object]] = [
    lambda run: run.driver.gpus.mark_for_host().wait(),
    lambda run: run.driver.gpus.synchronize(),
    lambda run: run.driver.timeline(run.driver.program(run.pipe.plan), 0),
]


def test_waits_on_the_host_give_up() -> None:
    with running() as run:
        run.stall(lambda fake: fake.hang("fake_kernel"))
        for wait in WAITS:
            assert "action 2F3" in refusal(partial(wait, run))


def test_a_failure_behind_work_that_hangs_is_raised() -> None:
    def fail(fake: FakeCuda) -> None:
        fake.hang("fake_kernel")
        run.layer.fails = True

    with running() as run:
        with pytest.raises(ZeroDivisionError):
            run.stall(fail)
        assert "ended the step, which failed" in refusal(run.step)


def test_a_capture_of_another_thread_goes_on_while_steps_are_watched() -> None:
    with running() as run:
        run.fake.set_capturing(True)
        before = run.fake.calls("cuEventQuery")
        run.driver.core.settle(lambda: run.fake.calls("cuEventQuery") > before + 10)
        run.step()
        run.driver.core.settle()
        run.fake.set_capturing(False)
        assert run.fake.calls("cuEventQuery") > before


def test_a_thread_that_waits_for_a_step_has_the_watch_while_another_one_closes_the_pipeline() -> (
    None
):
    looked, closed = threading.Event(), threading.Event()

    def is_done() -> bool:
        looked.set()
        closed.wait()
        return False

    with running(timeout=60.0) as run:
        run.stall(lambda fake: fake.hang("fake_kernel"))
        waits = threading.Thread(target=run.driver.core.settle, args=(is_done,))
        waits.start()
        looked.wait()
        run.fake.let_go()
        run.pipe.close()
        assert threads("pykern streams")
        closed.set()
        waits.join()
        assert not threads("pykern streams")


@pytest.mark.parametrize("capture", [False, True, "step"])
def test_a_timeout_changes_no_result_and_tells_of_no_other_step(
    capture: bool | str, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(timeout: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        with running(timeout, steps=0, capture=capture) as run:
            losses = [run.step() for _ in range(5)]
            run.driver.core.settle()
            assert bool(threads("pykern streams")) == (timeout is not None)
            return [*losses, *(p.grad for p in run.pipe.parameters() if p.grad is not None)]

    for with_one, without in zip(train(60.0), train(None), strict=True):
        assert torch.equal(with_one, without)
    assert "pykern" not in capfd.readouterr().err
