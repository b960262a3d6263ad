"""State that torch keeps per thread reaches the workers, and does not stay there."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pykern

variable = contextvars.ContextVar("variable", default="unset")


class Probe(nn.Module):
    """Records what `look` sees on the worker, in each forward."""

    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.look = look
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen.append(self.look(y))
        return y


class CountCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


def dtype_within() -> torch.dtype:
    """The type in which an autocast of a layer computes that names no type."""
    with torch.autocast("cpu"):
        return torch.mm(torch.ones(1, 1, device="cpu"), torch.ones(1, 1, device="cpu")).dtype


def hooks() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


STATES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[Tensor], Any]]] = {
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda y: (y.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "the dtype of an autocast that is off": (
        lambda: torch.autocast("cpu", dtype=torch.float16, enabled=False),
        lambda _: dtype_within(),
    ),
    "autocast's dtype that the caller has set": (
        lambda: autocast_dtype(torch.float16),
        lambda _: dtype_within(),
    ),
    "saved-tensor hooks": (
        hooks,
        lambda _: torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    ),
    "saved-tensor hooks disabled": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        lambda _: torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    ),
    "function mode": (
        CountCalls,
        lambda _: len(torch.overrides._get_current_function_mode_stack()),
    ),
    "dispatch mode": (
        CountOps,
        lambda _: [
            type(mode).__name__
            for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            if isinstance(mode, CountOps)
        ],
    ),
    "device context": (lambda: torch.device("meta"), lambda _: torch.empty(1).device.type),
}


@pytest.mark.parametrize("name", STATES)
def test_caller_state_is_seen_by_every_stage_and_forgotten_afterwards(name: str) -> None:
    context, look = STATES[name]
    plain = look_at(look)
    probes = [Probe(look) for _ in range(4)]
    with pykern.Pipeline(probes, devices="cpu:4", microbatches=3) as pipe:
        x = torch.randn(6, 4)
        for enter in (context, nullcontext, context):
            with enter() as _:
                expected = look_at(look)
                pipe(x)
            for probe in probes:
                assert probe.seen == [expected] * 3
                probe.seen.clear()
            assert look_at(look) == plain


def look_at(look: Callable[[Tensor], Any]) -> Any:
    """The state that the calling thread itself sees."""
    with torch.no_grad():
        return look(
            nn.functional.linear(torch.zeros(1, 4, device="cpu"), torch.zeros(4, 4, device="cpu"))
        )


def test_steps_and_forwards_see_the_grad_mode_of_their_caller() -> None:
    probes = [Probe(lambda y: (torch.is_grad_enabled(), y.requires_grad)) for _ in range(2)]
    with pykern.Pipeline(probes, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        pipe(torch.randn(4, 4))
        with torch.no_grad():
            pipe(torch.randn(4, 4))
    for probe in probes:
        assert probe.seen == [(True, True)] * 4 + [(False, False)] * 2


def test_inference_mode() -> None:
    probes = [Probe(lambda y: (torch.is_inference_mode_enabled(), y.is_inference()))] * 2
    with pykern.Pipeline(probes, devices="cpu:1", microbatches=2) as pipe:
        with torch.inference_mode():
            assert pipe(torch.randn(4, 4)).is_inference()
        assert not pipe(torch.randn(4, 4)).is_inference()
    assert probes[0].seen == [(True, True)] * 4 + [(False, False)] * 4


def test_modes_act_on_the_work_of_the_workers() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        for mode in (CountCalls(), CountOps()):
            with mode:
                pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
            # Two layers and a loss for each of two microbatches, at least.
            assert mode.count >= 6


def test_saved_tensor_hooks_act_on_the_work_of_the_workers() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with (
        pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert len(packed) >= 4


def test_context_variables_go_in_and_do_not_come_back() -> None:
    def look(_: Tensor) -> str:
        value = variable.get()
        # Another object each time: a worker may run both stages, and each must be seen to set it.
        variable.set(f"changed by a worker that saw {value}")
        return value

    probes = [Probe(look), Probe(look)]
    variable.set("from the caller")
    with pykern.Pipeline(probes, devices="cpu:2", microbatches=1) as pipe:
        pipe(torch.randn(4, 4))
        assert variable.get() == "from the caller"
        variable.set("from the caller again")
        pipe(torch.randn(4, 4))
    assert probes[0].seen == ["from the caller", "from the caller again"]


def test_workers_share_the_threads_of_the_caller() -> None:
    torch.set_num_threads(2)
    for num_devices, expected in ((1, 2), (2, 1)):
        probes = [Probe(lambda _: torch.get_num_threads()) for _ in range(num_devices)]
        with pykern.Pipeline(probes, devices=f"cpu:{num_devices}", microbatches=1) as pipe:
            pipe(torch.randn(4, 4))
        assert [probe.seen for probe in probes] == [[expected]] * num_devices
        assert torch.get_num_threads() == 2


def test_a_mode_that_cannot_be_entered_fails_the_step_cleanly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr("pykern.runtime.caller_state.CallerState.__call__", _refuse)
            with pytest.raises(OSError, match="no entry"):
                pipe(torch.randn(4, 4))
        assert pipe(torch.randn(4, 4)).shape == (4, 4)


def _refuse(_: object) -> None:
    raise OSError("no entry")
