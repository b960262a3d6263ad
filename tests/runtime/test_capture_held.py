"""Captures beside memory, graphs and gradients that torch still holds."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern import schedules
from pykern.runtime.batch import Batch
from pykern.runtime.gpu.capture import policy
from pykern.runtime.gpu.capture.recording import Recording
from pykern.runtime.gpu.capture.refusals import CannotCapture, held_graph
from pykern.runtime.loss import Losses
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.runtime.models import CASES, Case

PLAN = schedules.one_f_one_b(2, 4)


def output(case: Case) -> object:
    return case.layers(case.inputs)


def node(case: Case) -> object:
    """The node that adds up a gradient, which DistributedDataParallel holds for its hooks."""
    weight = next(case.layers.parameters())
    view = weight.expand_as(weight).grad_fn
    assert view is not None
    return view.next_functions[0][0]


@pytest.mark.parametrize("hold", [output, node])
def test_a_graph_that_is_held_is_named(gpus: FakeCuda, hold: Callable[[Case], object]) -> None:
    case = CASES["mlp"](16)
    held = [hold(case)]
    with case.pipeline(PLAN, "cuda", capture=True) as pipe:
        pipe.step(case.inputs, target=case.target)
        named = r"weight of Linear \(.*layer 0 of stage 0\) is in a graph that is still held"
        with pytest.raises(CannotCapture, match=named):
            pipe.step(case.inputs, target=case.target)
        held.clear()
        pipe.step(case.inputs, target=case.target)
        assert gpus.calls("cuGraphLaunch") > 0


def test_auto_tries_once_while_a_graph_is_held(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(stages: Any) -> CannotCapture | None:
        asked.append(stages)
        return held_graph(stages)

    monkeypatch.setattr(policy, "held_graph", ask)
    case = CASES["mlp"](16)
    held = output(case)
    with case.pipeline(PLAN, "cuda", capture="auto") as pipe:
        pipe.step(case.inputs, target=case.target)
        with pytest.warns(UserWarning, match="is in a graph that is still held"):
            pipe.step(case.inputs, target=case.target)
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
    assert len(asked) == 1
    del held


def test_gradients_of_before_a_step_are_not_kept_after_it(gpus: FakeCuda) -> None:
    case = CASES["mlp"](16)
    weight = next(case.layers.parameters())
    with case.pipeline(PLAN, "cuda", capture="auto") as pipe:
        weight.grad = torch.ones_like(weight)
        gradient = weakref.ref(weight.grad)
        pipe.step(case.inputs, target=case.target)
        weight.grad = None
        assert gradient() is None


def test_a_graph_in_a_circle_is_let_go_of(gpus: FakeCuda) -> None:
    case = CASES["mlp"](16)
    circle = [output(case)]
    circle.append(circle)
    del circle
    with case.pipeline(PLAN, "cuda", capture=True) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
        assert gpus.calls("cuGraphLaunch") > 0


def test_a_held_graph_is_named_where_it_makes_a_capture_fail(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(HostGpus, "capture", fail)
    case = CASES["mlp"](16)
    held = [output(case)]
    with case.pipeline(PLAN, "cuda", capture=True) as pipe:
        pipe.step(case.inputs, target=case.target)
        with pytest.raises(CannotCapture, match="is in a graph that is still held"):
            pipe.step(case.inputs, target=case.target)
        held.clear()
        with pytest.raises(CannotCapture, match=r"F of .* cannot be captured: operation failed"):
            pipe.step(case.inputs, target=case.target)


def test_the_cache_is_given_back_once_before_the_first_capture(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("give_back_cache", "capture"):
        noted = getattr(HostGpus, name)

        def note(*given: Any, name: str = name, noted: Any = noted) -> Any:
            calls.append(name)
            return noted(*given)

        monkeypatch.setattr(HostGpus, name, note)
    case = CASES["mlp"](16)
    with case.pipeline(PLAN, "cuda", capture=True) as pipe:
        for _ in range(3):
            pipe.step(case.inputs, target=case.target)
    assert calls[0] == "give_back_cache"
    assert set(calls[1:]) == {"capture"}


def test_graphs_that_cannot_have_memory_are_refused_with_their_bytes(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has four microbatches in flight; each capture takes 3 GiB of 11."""
    taken: list[int] = []
    capture = HostGpus.capture

    def take(*given: Any) -> Any:
        taken.append(3 * 2**30)
        return capture(*given)

    def room(*_: object) -> tuple[int, int]:
        return sum(taken), 11 * 2**30 - sum(taken)

    monkeypatch.setattr(HostGpus, "capture", take)
    monkeypatch.setattr(HostGpus, "room", room)
    case = CASES["mlp"](16)
    with case.pipeline(schedules.gpipe(2, 4), "cuda", capture=True) as pipe:
        pipe.step(case.inputs, target=case.target)
        refused = "stage 0 need 3072 MiB for each of 3 more .* in flight, and 8192 MiB are free"
        with pytest.raises(CannotCapture, match=refused):
            pipe.step(case.inputs, target=case.target)
        assert len(taken) == 1


def test_gradients_are_zeroed_gpu_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed: list[set[str]] = []

    def zero(tensors: list[Tensor]) -> None:
        zeroed.append({tensor.device.type for tensor in tensors})

    monkeypatch.setattr(torch, "_foreach_zero_", zero)
    monkeypatch.setattr(Recording, "_load_seeds", lambda _: None)
    recording = object.__new__(Recording)
    recording._inputs, recording._target, recording._scale = ((), {}), None, None
    recording._gradients = [
        (nn.Parameter(torch.ones(2, device=device)), torch.ones(2, device=device))
        for device in ("cpu", "meta", "cpu", "meta")
    ]
    losses = Losses(lambda output: output, None, [], None)
    recording.load(Batch(((), {}), None, (), losses))
    assert zeroed == [{"cpu"}, {"meta"}]


def test_gradients_stay_where_graphs_add_to_them(gpus: FakeCuda) -> None:
    """A parameter that has none before a replay has the captured one after it."""
    case = CASES["mlp"](8)
    places = []
    with case.pipeline(PLAN, ["cuda:0", "cuda:1"], capture=True) as pipe:
        for _ in range(4):
            pipe.zero_grad()
            pipe.step(case.inputs, target=case.target)
            gradients = [parameter.grad for parameter in pipe.parameters()]
            places.append([0 if grad is None else grad.data_ptr() for grad in gradients])
    assert places[1] == places[2] == places[3]


def test_nothing_is_collected_or_cached_in_a_capture(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be a graph or an event, and weights that autocast caches would be a graph's."""
    seen: list[tuple[bool, bool]] = []
    capture = HostGpus.capture

    def noted(*given: Any) -> object:
        seen.append((gc.isenabled(), torch.is_autocast_cache_enabled()))
        return capture(*given)

    monkeypatch.setattr(HostGpus, "capture", noted)
    case = CASES["mlp"](16)
    with case.pipeline(PLAN, "cuda", capture=True) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
    assert set(seen) == {(False, False)}
    assert gc.isenabled()
    assert torch.is_autocast_cache_enabled()
