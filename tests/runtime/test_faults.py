"""A fault in any action: the same object with a note, everything drained, the next step right."""

import copy
import gc
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Plan
from tests.diagonal import diagonal
from tests.runtime.plans import recomputed, split_backward, split_some, two_replicas
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

NUM_DEVICES = 4
NUM_MICROBATCHES = 8


class _Pass(torch.autograd.Function):
    """The identity, which tells its fuse when it is passed back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: "Fuse", kinds: tuple[Kind, ...]) -> Tensor:
        ctx.fuse, ctx.kinds = fuse, kinds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fuse.passed(*ctx.kinds)
        return gradients[0], None, None


class Fuse(nn.Module):
    """A linear layer that raises `error` in the n-th call of a kind in a replica, and remembers
    its activations."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seconds = seconds
        self.kind: Kind | None = None
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.linear.bias.register_post_accumulate_grad_hook(lambda _: self.passed(Kind.REDUCE))

    def arm(self, kind: Kind, call: int, error: BaseException, *, replica: bool = False) -> None:
        self.kind, self.left, self.error, self.replica = kind, [call], error, replica

    def disarm(self) -> None:
        self.kind = None

    def passed(self, *kinds: Kind) -> None:
        if kinds != (Kind.REDUCE,):
            time.sleep(self.seconds)
        # Replicas are copies made for the step, which share the list with the original.
        if self.kind in kinds and getattr(self, "_is_replica", False) == self.replica:
            if self.left[0] == 0:
                raise self.error
            self.left[0] -= 1

    def forward(self, x: Tensor) -> Tensor:
        self.passed(Kind.R if _is_recomputing() else Kind.F)
        weight = _Pass.apply(self.linear.weight, self, (Kind.W,))
        y: Tensor = torch.tanh(F.linear(x, weight, self.linear.bias))
        y = _Pass.apply(y, self, (Kind.B, Kind.I))
        self.alive.add(y)
        return y


def _is_recomputing() -> bool:
    frame: FrameType | None = sys._getframe()
    # An R calls what the stage has put together for it.
    while frame is not None and frame.f_code.co_qualname != "recompute.<locals>.recompute":
        frame = frame.f_back
    return frame is not None


ONE_F_ONE_B = schedules.one_f_one_b(NUM_DEVICES, NUM_MICROBATCHES)
# Each with the kinds it holds.
PLANS: dict[str, tuple[Plan, set[Kind]]] = {
    "one_f_one_b": (ONE_F_ONE_B, {Kind.F, Kind.B}),
    "hanayo": (schedules.hanayo(2, NUM_MICROBATCHES, waves=1), {Kind.F, Kind.B}),
    "recomputed": (
        recomputed(split_some(schedules.one_f_one_b(2, NUM_MICROBATCHES))),
        {Kind.F, Kind.R, Kind.B, Kind.I, Kind.W},
    ),
    "split": (split_backward(ONE_F_ONE_B, delay=2), {Kind.F, Kind.I, Kind.W}),
    "split replicas": (
        split_backward(two_replicas(2, NUM_MICROBATCHES)),
        {Kind.F, Kind.I, Kind.W, Kind.REDUCE},
    ),
}


# Short actions mostly run on the thread that releases them, longer ones on their device's own.
SHORT, LONG = 0.0, 0.0003
FAILURES = [
    (ArithmeticError, SHORT),
    (KeyboardInterrupt, LONG),
    (KeyboardInterrupt, SHORT),
    (ArithmeticError, LONG),
]


@pytest.mark.parametrize(("name", "failure"), diagonal(PLANS, FAILURES))
def test_every_action_may_fail(name: str, failure: tuple[type[BaseException], float]) -> None:
    error_type, seconds = failure
    plan, kinds = PLANS[name]
    layers = nn.Sequential(*(Fuse(seconds) for _ in range(plan.num_stages)))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    expected = plain_step(
        plain, x, y, F.mse_loss, NUM_MICROBATCHES, num_replicas=plan.placement.num_replicas
    )
    threads = threading.active_count()
    with pykern.Pipeline(
        layers, devices=f"cpu:{plan.num_devices}", schedule=plan, loss_fn=F.mse_loss
    ) as pipe:
        actions = [action for row in pipe.plan.rows for action in row]
        assert {action.kind for action in actions} == kinds
        for action in actions:
            # The first stage has no inputs to give gradients to: its I has nothing to do.
            if action.kind is Kind.I and action.stage == 0:
                continue
            # The others fail as they do without recompute.
            if name == "recomputed" and action.kind is not Kind.R:
                continue
            fail_once(pipe, layers, action, error_type(f"planted in {action}"), (x, y))
            pipe.zero_grad()
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
        # The workers show up as dummy threads once; no fault adds one.
        assert threading.active_count() <= threads + plan.num_devices


def fail_once(
    pipe: pykern.Pipeline,
    layers: nn.Sequential,
    action: Action,
    error: BaseException,
    batch: tuple[Tensor, Tensor],
) -> None:
    """Runs a step whose `action` raises `error`, and looks at what is left."""
    fuse = layers[pipe.partition.stages[action.stage][0]]
    assert isinstance(fuse, Fuse)
    num_replicas = pipe.plan.placement.num_replicas
    # A reduction is the first accumulation after those of the first replica's microbatches.
    reduces = action.kind is Kind.REDUCE
    call = (NUM_MICROBATCHES if reduces else action.microbatch) // num_replicas
    fuse.arm(action.kind, call, error, replica=action.microbatch % num_replicas > 0)
    with pytest.raises(type(error)) as caught:
        pipe.step(batch[0], target=batch[1])
    fuse.disarm()
    assert caught.value is error
    device = pipe.plan.device_of(action)
    assert error.__notes__ == [
        f"pykern: raised in stage {action.stage}, microbatch {action.microbatch}, "
        f"action {action}, device {device}"
    ]
    # The traceback holds the frames that hold the tensors of the failed action; nothing else does.
    error.__traceback__ = None
    del caught
    left = sum(len(layer.alive) for layer in layers if isinstance(layer, Fuse))
    if left:
        gc.collect()
        left = sum(len(layer.alive) for layer in layers if isinstance(layer, Fuse))
    assert left == 0


def test_two_faults_raise_the_first_and_mention_the_other() -> None:
    """Both stages are inside an action when the first one fails."""
    inside = threading.Barrier(2, timeout=10)
    first = ValueError("first")

    class Both(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.stage = stage
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls + self.stage == 2:
                inside.wait()
                if self.stage == 0:
                    raise first
                # The other has surely raised by the time this one does: its step is being stopped.
                failed.wait(timeout=10)
                raise KeyError("second")
            y: Tensor = self.linear(x)
            return y

    failed = threading.Event()

    class Noticed(Both):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except ValueError:
                threading.Timer(0.2, failed.set).start()
                raise

    layers = [Noticed(0), Both(1)]
    with pykern.Pipeline(
        layers, devices="cpu:2", schedule="gpipe", microbatches=4, loss_fn=F.mse_loss
    ) as pipe:
        with pytest.raises(ValueError, match="first") as caught:
            pipe.step(torch.randn(4, 2), target=torch.randn(4, 2))
        assert caught.value is first
        assert "action 0F1, device 0" in first.__notes__[0]
        assert "action 1F0, device 1 failed as well: KeyError('second')" in first.__notes__[1]


def test_an_action_that_waits_for_the_interpreter_does_not_start_after_a_failure() -> None:
    started: list[str] = []

    class Holds(nn.Module):
        """Fails in the second microbatch, after holding the interpreter for a while."""

        def forward(self, x: Tensor) -> Tensor:
            started.append("first stage")
            if started.count("first stage") == 2:
                end = time.monotonic() + 0.03
                while time.monotonic() < end:
                    pass
                raise ValueError("planted")
            return x

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            started.append("second stage")
            time.sleep(0.001)
            return x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)
    # Collecting the pipeline of another test would let go of the interpreter.
    gc.collect()
    gc.disable()
    num_waited = 0
    try:
        with pykern.Pipeline([Holds(), Waits()], devices="cpu:2", microbatches=4) as pipe:
            for _ in range(40):
                with pytest.raises(ValueError, match="planted"):
                    pipe(torch.ones(4, 2))
                # The second stage either came in between, or waited until it was too late.
                num_waited += started == ["first stage", "first stage"]
                assert started[-1] == "first stage"
                started.clear()
    finally:
        gc.enable()
        sys.setswitchinterval(interval)
    assert num_waited > 0


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses notes, which are an attribute."""

    code: int


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(),
        GeneratorExit(),
        SystemExit(3),
        torch.OutOfMemoryError("planted"),
        Frozen(3),
    ],
)
def test_odd_exceptions_arrive_as_they_are(error: BaseException) -> None:
    layers = nn.Sequential(Fuse(), Fuse())
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        for layer in layers:
            assert isinstance(layer, Fuse)
            layer.arm(Kind.F, 1, error)
            with pytest.raises(type(error)) as caught:
                pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))
            assert caught.value is error
            layer.disarm()


@pytest.mark.parametrize("kind", [Kind.F, Kind.R])
def test_what_refuses_attributes_arrives_from_a_stage_that_is_recomputed(kind: Kind) -> None:
    error = Frozen(3)
    layers = nn.Sequential(Fuse(), Fuse())
    plan = recomputed(schedules.one_f_one_b(2, 2))
    with pykern.Pipeline(layers, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        for layer in layers:
            assert isinstance(layer, Fuse)
            layer.arm(kind, 1, error)
            with pytest.raises(Frozen) as caught:
                pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))
            assert caught.value is error
            layer.disarm()


def test_a_failing_loss_names_the_last_stage() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError(f"{output.shape} {target.shape}")

    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=loss) as pipe:
        with pytest.raises(ZeroDivisionError) as caught:
            pipe.step(torch.randn(4, 2), target=torch.randn(4, 2))
        assert caught.value.__notes__ == [
            "pykern: raised in stage 1, microbatch 0, action 1F0, device 1"
        ]
