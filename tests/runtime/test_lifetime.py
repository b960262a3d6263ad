"""Around the steps of a pipeline: interrupts, re-entry, closing, what is left behind."""

import contextlib
import gc
import os
import random
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.runtime.plans import split_backward, two_replicas
from tests.support.threads import await_end, workers


class Slow(nn.Module):
    """A stage that takes a while, in Python or asleep."""

    def __init__(self, seconds: float, *, spin: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seconds = seconds
        self.spin = spin

    def forward(self, x: Tensor) -> Tensor:
        end = time.monotonic() + self.seconds
        while self.spin and time.monotonic() < end:
            pass
        if not self.spin:
            time.sleep(self.seconds)
        y: Tensor = self.linear(x)
        return y


def pipeline(*layers: nn.Module) -> pykern.Pipeline:
    return pykern.Pipeline(layers, devices=f"cpu:{len(layers)}", microbatches=4, loss_fn=F.mse_loss)


BATCH = (torch.ones(4, 2), torch.zeros(4, 2))


@pytest.mark.parametrize("seconds", [0.03, 20.0])
def test_an_interrupt_ends_the_step_within_a_tenth_of_a_second(seconds: float) -> None:
    """Also while a stage spins in Python for 20 s."""
    layers = Slow(seconds, spin=True), Slow(0.0)
    with pipeline(*layers) as pipe:
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.06, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe.step(BATCH[0], target=BATCH[1])
        delay = time.monotonic() - sent[0]
        timer.join()
        assert not hasattr(caught.value, "__notes__")
        # A tenth of a second is the promise; the rest is for a machine that is busy with other
        # tests.
        assert delay < 0.1 + 0.3
        layers[0].seconds = 0.0
        first = pipe.step(BATCH[0], target=BATCH[1])
        assert torch.equal(first, pipe.step(BATCH[0], target=BATCH[1]))


def test_interrupts_at_any_time_leave_a_working_pipeline() -> None:
    layers = [Slow(0.002) for _ in range(3)]
    with pipeline(*layers) as pipe:
        expected = pipe.step(BATCH[0], target=BATCH[1])
        for attempt in range(40):
            timer = threading.Timer(0.001 * attempt, os.kill, (os.getpid(), signal.SIGINT))
            interrupted = False
            try:
                timer.start()
                pipe.step(BATCH[0], target=BATCH[1])
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                interrupted = True
            timer.join()
            assert interrupted
            assert torch.equal(pipe.step(BATCH[0], target=BATCH[1]), expected)


def test_what_an_interrupt_left_half_done_does_not_reach_the_next_step() -> None:
    class Interrupted(nn.Module):
        """Stays in a mode, as if the interrupt had come while the mode was being entered."""

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            if len(seen) == 1:
                torch.autocast("cpu").__enter__()
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(100):
                    time.sleep(0.01)
            return x

    seen: list[bool] = []
    with pipeline(Interrupted(), nn.Linear(2, 2)) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe(BATCH[0])
        pipe(BATCH[0])
    assert seen == [False] * 5


def test_a_second_interrupt_is_a_note_of_the_first() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for signal_number in (signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), signal_number)
                with contextlib.suppress(KeyboardInterrupt):
                    for _ in range(10):
                        time.sleep(0.01)
            return x

    with pipeline(Stubborn(), nn.Linear(2, 2)) as pipe:
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe(BATCH[0])
        assert caught.value.__notes__ == [
            "pykern: a signal handler failed as well: KeyboardInterrupt()"
        ]


def test_an_interrupt_outside_the_workers_leaves_a_working_pipeline() -> None:
    """Signals hit the caller's own work before and after the workers', too."""
    layers = [nn.Linear(2, 2) for _ in range(8)]
    interrupted = 0
    delays = random.Random(3)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pykern.Pipeline(layers, devices="cpu:8", microbatches=1, loss_fn=F.mse_loss) as pipe:
            expected = pipe.step(BATCH[0], target=BATCH[1])
            start = time.monotonic()
            for _ in range(20):
                pipe.step(BATCH[0], target=BATCH[1])
            length = (time.monotonic() - start) / 20
            for _ in range(1000):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, length))
                    pipe.step(BATCH[0], target=BATCH[1])
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
            assert torch.equal(pipe.step(BATCH[0], target=BATCH[1]), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 100


def test_a_signal_handler_cannot_close_the_pipeline_it_interrupts() -> None:
    with pipeline(Slow(0.1), Slow(0.1)) as pipe:
        previous = signal.signal(signal.SIGALRM, lambda *_: pipe.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(RuntimeError, match="cannot close the pipeline that runs it"):
                pipe(BATCH[0])
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert pipe(BATCH[0]).shape == (4, 2)


def test_a_stage_cannot_call_its_own_pipeline() -> None:
    class Reenter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = holder[0](x)
            return y

    holder: list[pykern.Pipeline] = []
    with pipeline(nn.Linear(2, 2), Reenter()) as pipe:
        holder.append(pipe)
        with pytest.raises(RuntimeError, match="already running a step") as caught:
            pipe(BATCH[0])
        assert "action 1F0" in caught.value.__notes__[0]
        holder.clear()


def test_a_stage_cannot_close_its_own_pipeline() -> None:
    class Close(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            holder[0].close()
            return x

    holder: list[pykern.Pipeline] = []
    with pipeline(nn.Linear(2, 2), Close()) as pipe:
        holder.append(pipe)
        with pytest.raises(RuntimeError, match="cannot close the pipeline that runs it"):
            pipe(BATCH[0])
        holder.clear()


def test_a_second_thread_is_refused_while_a_step_runs() -> None:
    with pipeline(Slow(0.2), Slow(0.0)) as pipe:
        other = threading.Thread(target=pipe, args=(BATCH[0],))
        other.start()
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="already running a step"):
            pipe(BATCH[0])
        other.join()
        assert pipe(BATCH[0]).shape == (4, 2)


def test_a_pipeline_may_be_used_from_another_thread_later() -> None:
    with pipeline(nn.Linear(2, 2), nn.Linear(2, 2)) as pipe:
        expected = pipe(BATCH[0])
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(pipe(BATCH[0])))
        thread.start()
        thread.join()
        assert torch.equal(results[0], expected)


def test_closing_stops_a_step_in_another_thread() -> None:
    pipe = pipeline(Slow(0.05), Slow(0.05))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(100):
                pipe(BATCH[0])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.12)
    pipe.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])


def test_a_closed_pipeline_says_so() -> None:
    pipe = pipeline(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe(BATCH[0])


def test_an_abandoned_pipeline_ends_its_threads() -> None:
    before = workers()
    pipe = pipeline(*(nn.Linear(2, 2) for _ in range(4)))
    pipe(BATCH[0])
    own = workers() - before
    assert len(own) == 4
    reference = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert reference() is None
    await_end(own)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deferred_batch_norm": True},
        {"check_finite": "activations"},
        {"recompute": "stage"},
        {"schedule": "chimera"},
        {"verify": 2},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_threads_end_with_the_last_reference(options: dict[str, Any]) -> None:
    """Without a collection: a program that waits for its threads would wait for one."""
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(2)]
    if "deferred_batch_norm" in options:
        layers[1].append(nn.BatchNorm1d(2))
    pipe = pykern.Pipeline(
        layers, devices="cpu:2", loss_fn=F.mse_loss, **{"microbatches": 2} | options
    )
    pipe.step(BATCH[0], target=BATCH[1])
    executor = weakref.ref(pipe._executor)
    gc.collect()
    gc.disable()
    try:
        del pipe
        assert executor() is None
    finally:
        gc.enable()


def test_a_step_keeps_nothing_alive() -> None:
    x = torch.ones(4, 2)
    with pipeline(nn.Linear(2, 2), nn.Linear(2, 2)) as pipe:
        references = [weakref.ref(x)]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            references.extend([weakref.ref(output), weakref.ref(target)])
            return F.mse_loss(output, target)

        pipe._loss_fn = loss
        pipe.step(x, target=torch.zeros(4, 2))
        del x
        gc.collect()
        assert [reference() for reference in references] == [None] * 9


@pytest.mark.parametrize(
    "plan",
    [
        schedules.one_f_one_b(3, 2),
        split_backward(schedules.one_f_one_b(3, 2)),
        split_backward(two_replicas(3, 2)),
    ],
    ids=["whole", "split", "replicas"],
)
def test_a_step_leaves_no_garbage(plan: Plan) -> None:
    """Nothing waits for the cycle collector, which long trainings often switch off."""
    layers = [nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2)]
    with pykern.Pipeline(layers, devices="cpu:3", schedule=plan, loss_fn=F.mse_loss) as pipe:
        pipe.step(BATCH[0], target=BATCH[1])
        pipe(BATCH[0])
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                pipe.step(BATCH[0], target=BATCH[1])
                pipe(BATCH[0])
            assert gc.collect() == 0
        finally:
            gc.enable()
