"""Streams of batches: the same bits as one by one, and no drain between them."""

import copy
import gc
import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.runtime.models import CASES
from tests.runtime.plans import two_replicas
from tests.runtime.streaming import numbered, pipeline
from tests.support.pipelines import planned

PLANS: dict[str, Plan] = {
    "one worker": schedules.gpipe(1, 3),
    "one_f_one_b": schedules.one_f_one_b(3, 4),
    "one microbatch": schedules.one_f_one_b(2, 1),
    "looped": schedules.interleaved(2, 4, 2),
    "hanayo": schedules.hanayo(2, 4, 1),
    "replicas": two_replicas(2, 3),
}
SIZES = (11, 4, 1, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 11, 2)


class Doubles(nn.Module):
    """Remembers what is alive of its results, and how many it has ever had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        self.alive.add(y)
        self.counts.append(len(self.alive))
        return y


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_outputs_are_those_of_each_batch_alone(plan: Plan) -> None:
    case = CASES["gpt"](11)
    with pykern.Pipeline(case.layers, devices=f"cpu:{plan.num_devices}", schedule=plan) as pipe:
        batches = [case.inputs[torch.randint(11, (rows,))] for rows in SIZES]
        expected = [pipe(batch) for batch in batches]
        for _ in range(2):
            outputs = list(pipe.stream(batches))
            assert len(outputs) == len(expected)
            assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_buffers_and_random_numbers_go_on_as_in_a_loop(mode: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    batches = [torch.randn(4, 3) for _ in range(6)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        pipe.train(mode == "train")
        begin = {name: value.clone() for name, value in pipe.state_dict().items()}
        torch.manual_seed(5)
        expected = [(pipe(batch), torch.rand(1)) for batch in batches]
        after = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.load_state_dict(begin)
        torch.manual_seed(5)
        found = [(output, torch.rand(1)) for output in pipe.stream(batches)]
        for (output, drawn), (other, also) in zip(found, expected, strict=True):
            assert torch.equal(output, other)
            assert torch.equal(drawn, also)
        assert all(torch.equal(value, after[name]) for name, value in pipe.state_dict().items())


class Drops(nn.Linear):
    def forward(self, x: Tensor, drops: bool = False) -> Tensor:
        return torch.dropout(super().forward(x), 0.5, drops)


@pytest.mark.parametrize("devices", ["cpu", "cuda"])
def test_batches_of_other_values_run_alone(devices: str, request: pytest.FixtureRequest) -> None:
    """They may steer layers: here, whether layers draw random numbers."""
    if devices == "cuda":
        request.getfixturevalue("gpus")
    plan = schedules.one_f_one_b(2, 2)
    with planned([Drops(3, 3), nn.Linear(3, 3)], plan, devices=devices) as pipe:
        batches = [(torch.randn(4, 3), drops) for drops in map(bool, (0, 0, 1, 1, 0, 0, 0, 1, 0))]
        torch.manual_seed(5)
        with torch.no_grad():
            expected = [pipe(*batch) for batch in batches]
        for _ in range(2):
            torch.manual_seed(5)
            assert all(map(torch.equal, pipe.stream(batches), expected))


class Multiplies(nn.Linear):
    def forward(self, x: Tensor, by: object = 1) -> Tensor:
        return super().forward(x) * (by if isinstance(by, int) else len(str(by)))


@pytest.mark.parametrize(("kind", "num_alone"), [(int, 1), (str, 6)])
def test_batches_of_other_whole_numbers_overlap(
    kind: type, num_alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position or a length differs from batch to batch."""
    with planned([Multiplies(3, 3), nn.Linear(3, 3)], schedules.one_f_one_b(2, 2)) as pipe:
        batches = [(torch.randn(4, 3), kind(10**number)) for number in range(6)]
        with torch.no_grad():
            expected = [pipe(*batch) for batch in batches]
        predict = pipe._executor.predict
        alone: list[None] = []

        def counted(*arguments: Any) -> Any:
            alone.append(None)
            return predict(*arguments)

        monkeypatch.setattr(pipe._executor, "predict", counted)
        assert all(map(torch.equal, pipe.stream(batches), expected))
        assert len(alone) <= num_alone


class Meets(nn.Module):
    """Notes with which microbatches it has begun, and has some wait until another has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self.order: list[int] = []
        self.met: list[bool] = []
        # By number: the other layer, and with what it must have begun.
        self.meetings: dict[int, tuple[Meets, int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0])
        self.order.append(number)
        self.begun[number].set()
        # Long enough to be worth a thread of its own.
        time.sleep(0.001)
        if number in self.meetings:
            other, its_number = self.meetings[number]
            self.met.append(other.begun[its_number].wait(timeout=10))
        return x


def test_deferred_statistics_are_those_of_each_batch() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    batches = [torch.randn(4, 3) for _ in range(5)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, deferred_batch_norm=True) as pipe:
        begin = copy.deepcopy(pipe.state_dict())
        with torch.no_grad():
            expected = [pipe(batch) for batch in batches]
        after = copy.deepcopy(pipe.state_dict())
        pipe.load_state_dict(begin)
        assert all(map(torch.equal, pipe.stream(batches), expected))
        assert all(torch.equal(value, after[name]) for name, value in pipe.state_dict().items())


def test_no_stage_waits_for_the_end_of_a_batch() -> None:
    """While the last stage has batch k, the first has begun with batch k + S - 1, for each k: as in
    a pipeline of one batch with as many microbatches, whose makespan is N + S - 1 actions."""
    num_stages, num_batches = 3, 12
    layers = [Meets() for _ in range(num_stages)]
    for stage in range(1, num_stages):
        for number in range(num_batches - stage):
            layers[stage].meetings[number] = layers[0], number + stage
    with pipeline(layers, num_stages) as pipe:
        numbers = [int(y[0, 0]) for y in pipe.stream(numbered(num_batches))]
    assert numbers == list(range(num_batches))
    for stage, layer in enumerate(layers):
        assert layer.order == [-1, *range(num_batches)]
        assert layer.met == [True] * len(layer.meetings) == [True] * (stage and num_batches - stage)


def test_no_stage_waits_for_the_end_of_one_in_many_microbatches() -> None:
    """While the second stage has the last microbatch of a batch, the first begins the next one."""
    layers = [Meets() for _ in range(2)]
    layers[1].meetings = {4 * batch + 3: (layers[0], 4 * batch + 4) for batch in range(4)}
    batches = [torch.cat(numbered(4 * batch + 4)[4 * batch :]) for batch in range(5)]
    with pipeline(layers, microbatches=4) as pipe:
        assert all(map(torch.equal, pipe.stream(batches), batches))
    assert layers[0].order == layers[1].order == [-1] * 4 + list(range(20))
    assert layers[1].met == [True] * 4


def test_batches_are_asked_for_in_the_calling_thread_and_as_many_as_there_is_room_for() -> None:
    asked: list[int] = []

    def endless() -> Iterator[Tensor]:
        while True:
            assert threading.current_thread() is threading.main_thread()
            asked.append(len(asked))
            yield torch.ones(2, 2)

    layers = [Doubles(), Doubles()]
    with pipeline(layers, microbatches=2) as pipe:
        stream = pipe.stream(endless())
        assert asked == []
        # Two batches of two microbatches, and one more where each stage has room for another.
        for taken in range(20):
            output = next(stream)
            assert torch.equal(output, torch.full((2, 2), 4.0))
            assert len(asked) == taken + 3
            time.sleep(0.002)
            del output
            # A slow caller has the next outputs wait, and no more than that.
            assert len(layers[1].alive) <= 6
        stream.close()
        assert max(layers[0].counts + layers[1].counts) <= 6
        gc.collect()
        assert not layers[0].alive
        assert not layers[1].alive


class Tells(nn.Module):
    """Returns what holds where it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {
            "dtype": y.dtype,
            "grad": torch.is_grad_enabled() or y.requires_grad,
            "inference": torch.is_inference_mode_enabled() and y.is_inference(),
            "y": y,
        }


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (torch.enable_grad, (torch.float32, False, False)),
        (torch.inference_mode, (torch.float32, False, True)),
        (lambda: torch.autocast("cpu", torch.bfloat16), (torch.bfloat16, False, False)),
    ],
    ids=["plain", "inference mode", "autocast"],
)
def test_stages_run_in_the_callers_state(context: Callable[[], Any], expected: Any) -> None:
    with pipeline([nn.Identity(), Tells()]) as pipe, context():
        outputs = list(pipe.stream(numbered(4)))
        assert torch.is_grad_enabled() == (context is not torch.inference_mode)
        for output in outputs:
            assert (output["dtype"], output["grad"], output["inference"]) == expected
        assert torch.equal(outputs[3]["y"], pipe(numbered(4)[3])["y"])


class Masked(nn.Module):
    """A model with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) * mask) * mask
        return y


def test_batches_may_be_arguments_and_arguments_by_name() -> None:
    x, mask = torch.randn(2, 5, 2)
    with pykern.Pipeline(Masked(), devices="cpu:2", microbatches=2, sample=(x, mask)) as pipe:
        batches: list[Any] = [(x, mask), {"x": mask, "mask": x}, {"mask": mask, "x": x}]
        outputs = list(pipe.stream(batches * 3))
        expected = [pipe(x, mask), pipe(mask, x), pipe(x, mask)] * 3
        assert len(outputs) == len(expected)
        assert all(map(torch.equal, outputs, expected))


def test_what_has_to_be_recorded_is_recorded_while_nothing_runs() -> None:
    """Each new size of a microbatch is recorded, for a model with a forward of its own."""
    x, mask = torch.randn(2, 40, 2)
    sizes = [*range(2, 20), *range(2, 20)]
    with pykern.Pipeline(Masked(), devices="cpu:2", microbatches=2, sample=(x, mask)) as pipe:
        outputs = list(pipe.stream((x[:rows], mask[:rows]) for rows in sizes))
        expected = [pipe(x[:rows], mask[:rows]) for rows in sizes]
        assert all(map(torch.equal, outputs, expected))
        assert len(outputs) == len(expected)


class Scales(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def test_what_is_given_by_name_belongs_to_its_batch() -> None:
    layers = [nn.Identity(), Scales()]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        run = pipe._executor.stream
        calls = [((torch.ones(3, 2),), {"scale": 2.0} if number % 2 else {}) for number in range(9)]
        outputs = run(pipe._predict_program, iter(calls), pipe._open_batch)
        assert [int(output[0, 0]) for output in outputs] == [1, 2] * 4 + [1]


class LateWidth(nn.Module):
    """The last block alone uses `late`, which skips the stages before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + late.sum(1, keepdim=True)


def test_values_that_skip_stages_go_with_their_batch_in_replicas() -> None:
    kept = []

    def batch(number: int) -> tuple[Tensor, Tensor]:
        late = torch.zeros(6, 5)
        kept.append(weakref.ref(late.untyped_storage()))
        return torch.full((6, 2), float(number)), late

    sample = torch.ones(3, 2), torch.ones(3, 5)
    with torch.no_grad(), planned(LateWidth(), two_replicas(2, 3), None, sample=sample) as pipe:
        stream = pipe.stream(map(batch, range(8)))
        for _ in range(8):
            next(stream)
        # The worker of the last output may still be on its way out of the forward.
        deadline = time.monotonic() + 5
        while any(storage() is not None for storage in kept) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sum(storage() is not None for storage in kept) == 0
        assert list(stream) == []


def test_changes_of_values_nest_no_iterators() -> None:
    layer = Named()
    with planned(nn.Sequential(layer, nn.Identity()), schedules.gpipe(2, 1), None) as pipe:
        batches = ((torch.ones(1, 2), "ab"[number // 2 % 2]) for number in range(40))
        stream = pipe.stream(batches)
        for _ in range(39):
            next(stream)
        assert sum(type(one) is itertools.chain for one in gc.get_referents(stream)) == 0
        assert len(list(stream)) == 1


class Named(nn.Module):
    """Takes a name beside its input."""

    def forward(self, x: Tensor, name: str) -> Tensor:
        del name
        return x
