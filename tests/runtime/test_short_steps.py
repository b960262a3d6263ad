"""Steps of one device that run on the thread that called them, once they are known to be short."""

import contextvars
import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import Pipeline
from pykern.torch_private import compiler
from tests.interrupts import modes
from tests.runtime.test_exit import run_python

X = torch.ones(4, 2)


class Does(nn.Module):
    """A layer whose forward calls `first` before anything else."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.first = first
        self.threads: list[threading.Thread] = []

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.current_thread())
        self.first()
        y: Tensor = self.linear(x)
        return y


@contextmanager
def short_steps(layer: nn.Module, **options: Any) -> Iterator[Pipeline]:
    """A pipeline that has seen how short its steps are."""
    given: dict[str, Any] = {"devices": "cpu:1", "microbatches": 2, "loss_fn": F.mse_loss} | options
    with Pipeline([layer], **given) as pipe:
        for _ in range(2):
            pipe.step(X, target=X)
        pipe.zero_grad()
        yield pipe


def threads_of_a_step(pipe: Pipeline, layer: Does) -> set[str]:
    layer.threads.clear()
    pipe.step(X, target=X)
    here = threading.current_thread()
    return {"caller" if thread is here else "worker" for thread in layer.threads}


def test_short_steps_run_on_the_thread_that_calls_them() -> None:
    layer = Does()
    with Pipeline([layer], devices="cpu:1", microbatches=2, loss_fn=F.mse_loss) as pipe:
        # Nothing is known of a step that has not run yet.
        assert threads_of_a_step(pipe, layer) == {"worker"}
        assert threads_of_a_step(pipe, layer) == {"caller"}
        # A forward has a program of its own.
        for expected in ("worker", "caller"):
            layer.threads.clear()
            pipe(X)
            assert {t is threading.current_thread() for t in layer.threads} == {
                expected == "caller"
            }


@pytest.mark.parametrize(
    ("options", "layers"),
    [({"timeout": 60.0}, 1), ({"devices": "cpu:2"}, 2)],
    ids=["a timeout", "two devices"],
)
def test_other_steps_run_on_workers(options: dict[str, Any], layers: int) -> None:
    layer = Does()
    given: dict[str, Any] = {"devices": "cpu:1", "microbatches": 2, "loss_fn": F.mse_loss} | options
    with Pipeline([layer, *(Does() for _ in range(layers - 1))], **given) as pipe:
        for _ in range(3):
            assert threads_of_a_step(pipe, layer) == {"worker"}


def test_long_steps_run_on_workers() -> None:
    layer = Does(lambda: time.sleep(0.011))
    with Pipeline([layer], devices="cpu:1", microbatches=2, loss_fn=F.mse_loss) as pipe:
        for _ in range(3):
            assert threads_of_a_step(pipe, layer) == {"worker"}


def test_both_threads_give_the_same_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    options: dict[str, Any] = {"devices": "cpu:1", "microbatches": 2, "loss_fn": F.mse_loss}
    found: list[list[Tensor]] = []
    for timeout in (None, 60.0):
        layers = copy.deepcopy(model)
        torch.manual_seed(1)
        with Pipeline(layers, timeout=timeout, **options) as pipe:
            losses = [pipe.step(X, target=X) for _ in range(4)]
        gradients = [p.grad for p in layers.parameters() if p.grad is not None]
        found.append([*losses, *gradients, torch.get_rng_state()])
    here, on_a_worker = found
    assert all(map(torch.equal, here, on_a_worker))


def test_an_error_names_its_action_and_the_next_step_is_right() -> None:
    layer = Does()
    with short_steps(layer) as pipe:
        expected = pipe(X).detach()
        planted = ValueError("planted")

        def fail() -> None:
            raise planted

        layer.first = fail
        with pytest.raises(ValueError, match="planted") as caught:
            pipe.step(X, target=X)
        assert caught.value is planted
        assert caught.value.__notes__ == [
            "pykern: raised in stage 0, microbatch 0, action 0F0, device 0"
        ]
        layer.first = lambda: None
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert torch.equal(pipe(X), expected)


def test_ctrl_c_ends_a_sleep_at_once() -> None:
    """On a worker the sleep would come to its end first."""
    layer = Does()
    with short_steps(layer) as pipe:

        def sleep() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60.0)

        layer.first = sleep
        before = modes()
        with pytest.raises(KeyboardInterrupt):
            pipe.step(X, target=X)
        assert modes() == before
        layer.first = lambda: None
        assert threads_of_a_step(pipe, layer) == {"caller"}


def test_modes_that_a_layer_leaves_behind_end_with_the_step() -> None:
    layer = Does()
    variable = contextvars.ContextVar("variable", default="unset")
    with short_steps(layer) as pipe:

        def leave() -> None:
            variable.set("set by a layer")
            torch.set_autocast_enabled("cpu", True)
            torch.set_grad_enabled(False)

        layer.first = leave
        before = modes()
        pipe(X)
        assert (modes(), variable.get()) == (before, "unset")


def test_a_layer_can_neither_call_nor_close_its_own_pipeline() -> None:
    layer = Does()
    with short_steps(layer) as pipe:
        layer.first = lambda: pipe(X)
        with pytest.raises(RuntimeError, match="already running a step"):
            pipe.step(X, target=X)
        layer.first = pipe.close
        with pytest.raises(RuntimeError, match="cannot close the pipeline that runs it"):
            pipe.step(X, target=X)
        layer.first = lambda: None
        assert threads_of_a_step(pipe, layer) == {"caller"}


def test_a_layer_may_run_another_pipeline() -> None:
    inner_layer, layer = Does(), Does()
    with short_steps(inner_layer) as inner, short_steps(layer) as pipe:
        layer.first = lambda: inner(X)
        inner(X)
        inner_layer.threads.clear()
        assert threads_of_a_step(pipe, layer) == {"caller"}
        assert set(inner_layer.threads) == {threading.current_thread()}


def test_another_thread_closes_a_short_step() -> None:
    layer = Does()
    inside, go = threading.Event(), threading.Event()
    with short_steps(layer) as pipe:

        def wait() -> None:
            inside.set()
            assert go.wait(60)

        layer.first = wait
        errors: list[BaseException] = []

        def step() -> None:
            try:
                pipe.step(X, target=X)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        assert inside.wait(60)
        closer = threading.Thread(target=pipe.close)
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
        go.set()
        closer.join(60)
        thread.join(60)
        assert [str(error) for error in errors] == ["the pipeline was closed while it ran a step"]


def test_ctrl_c_reaches_a_short_step_whose_end_a_close_waits_for() -> None:
    layer = Does()
    inside = threading.Event()
    with short_steps(layer) as pipe:

        def wait() -> None:
            inside.set()
            for _ in range(6000):
                time.sleep(0.01)

        layer.first = wait
        errors: list[BaseException] = []

        def step() -> None:
            try:
                pipe.step(X, target=X)
            except KeyboardInterrupt as error:
                errors.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        assert inside.wait(60)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pipe.close()
        thread.join(60)
        assert len(errors) == 1


@pytest.mark.forks
def test_a_child_that_is_forked_within_a_short_step_ends_it() -> None:
    """As in a loop. Further steps need a pipeline of the child's own."""
    result = run_python(
        """
    class Forks(nn.Module):
        forks = False
        def forward(self, x):
            if self.forks:
                Forks.forks = False
                children.append(os.fork())
            return 2 * x
    children = []
    pipe.close()
    pipe = pykern.Pipeline([Forks()], devices="cpu:1", microbatches=2)
    pipe(x), pipe(x)
    Forks.forks = True
    right = torch.equal(pipe(x), 2 * x)
    if children == [0]:
        try:
            pipe(x)
        except RuntimeError as error:
            os._exit(0 if right and "does not survive a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(children[0], 0)[1] == 0
    assert right and torch.equal(pipe(x), 2 * x)
    """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_profile_of_the_caller_has_each_action_once() -> None:
    layer = Does()
    with short_steps(layer) as pipe:
        with torch.profiler.profile() as profile:
            pipe.step(X, target=X)
        names = [event.name for event in profile.events() if event.name.startswith("pykern ")]
    assert sorted(name.split()[1] for name in names if " s0 " in name) == ["B", "B", "F", "F"]


def test_an_asynchronous_schedule_runs_there_too() -> None:
    layer = Does()
    with pykern.AsyncPipeline(
        [layer],
        devices="cpu:1",
        microbatches=2,
        schedule="pipedream",
        loss_fn=F.mse_loss,
        optimizer=lambda of: torch.optim.SGD(of, 0.1),
    ) as pipe:
        for _ in range(4):
            layer.threads.clear()
            pipe.step(X, target=X)
        assert set(layer.threads) == {threading.current_thread()}


STATES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    ),
    "a function mode": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("state", STATES)
def test_steps_run_on_workers_where_the_caller_has_more_than_a_grad_mode(state: str) -> None:
    layer = Does()
    with short_steps(layer) as pipe, STATES[state]():
        assert threads_of_a_step(pipe, layer) == {"worker"}


def test_steps_within_one_autocast_use_the_weights_of_each_step() -> None:
    """Autocast keeps cast weights until it ends on a thread."""
    torch.manual_seed(0)
    found = []
    for timeout in (None, 60.0):
        layer = Does()
        nn.init.eye_(layer.linear.weight)
        nn.init.zeros_(layer.linear.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        with (
            short_steps(layer, timeout=timeout) as pipe,
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            losses = []
            for _ in range(3):
                losses.append(pipe.step(X, target=2 * X).item())
                optimizer.step()
        found.append(losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiler_of_the_caller_compiles_no_layer() -> None:
    layer = Does()
    seen: list[object] = []
    with short_steps(layer) as pipe:
        layer.first = lambda: seen.append(compiler())
        plain = pipe.step(X, target=X)
        pipe.zero_grad()
        calls: dict[str, Callable[[Tensor], Any]] = {
            "step": lambda x: pipe.step(x, target=x),
            "forward": pipe.forward,
            "map": lambda x: pipe.map(F.mse_loss, x, target=x),
        }
        for call in calls.values():
            torch.compile(call, backend="eager")(X)
        assert torch.equal(torch.compile(calls["step"], backend="eager")(X), plain)
    assert set(seen) == {None}
    assert compiler() is None
