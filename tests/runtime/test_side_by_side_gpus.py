"""Replicas side by side on GPUs: the bits of CPU workers, and sums that wait for their stage alone.

On the fake driver; where things go is told by a device with nothing but sizes.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Plan, Timeline, with_replicas
from pykern.runtime.batch import Batch
from pykern.runtime.executor import Executor
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.stage.replica import Replica
from pykern.runtime.stage.stage import Stage
from pykern.trace import Segment
from pykern.trace.values import Held
from tests.diagonal import diagonal
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

META = torch.device("meta")

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "one_f_one_b": {},
    "interleaved": {"num_chunks": 2},
    "zb_h1": {},
    "hanayo": {"waves": 2},
    "chimera": {},
}
DEVICES: dict[str, Any] = {
    "four GPUs": [f"cuda:{gpu}" for gpu in range(4)],
    "two GPUs": ["cuda:1", "cuda:0"] * 2,
    "a GPU for each replica": ["cuda:0", "cuda:0", "cuda:1", "cuda:1"],
    "parts": "cuda:0/4",
}
# Running statistics are refused where there are replicas.
MODELS = sorted(CASES.keys() - {"cnn"})


@pytest.mark.parametrize(("name", "devices", "model"), diagonal(SCHEDULES, DEVICES, MODELS))
def test_ten_steps_have_the_bits_of_the_reference_order(
    gpus: FakeCuda, name: str, devices: str, model: str
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers,
        devices=DEVICES[devices],
        schedule=name,
        replicas=2,
        microbatches=5,
        loss_fn=case.loss_fn,
        **SCHEDULES[name],
    ) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (pipe, plain)]
        for rows in (11, 3, 1, 8, 11, 10, 2, 11, 7, 11):
            x, y = case.inputs[:rows], case.target[:rows]
            stages, num_replicas = pipe.partition.stages, pipe.plan.placement.num_replicas
            expected = plain_step(plain, x, y, case.loss_fn, 5, stages, num_replicas=num_replicas)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_recompute_and_peers_out_of_reach(gpus: FakeCuda) -> None:
    gpus.set_peer(2, 3, reachable=False)
    case = CASES["dropout"](11)
    plain = copy.deepcopy(case.layers)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 2 to 3. "):
        pipe = pykern.Pipeline(
            case.layers,
            devices=DEVICES["four GPUs"],
            replicas=2,
            microbatches=6,
            recompute="stage",
            loss_fn=case.loss_fn,
        )
    with pipe:
        for _ in range(2):
            expected = plain_step(
                plain, case.inputs, case.target, case.loss_fn, 6, pipe.partition.stages,
                num_replicas=2,
            )  # fmt: skip
            assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)


def span_of(timeline: Timeline, kind: Kind, stage: int, microbatch: int) -> Any:
    action = Action(kind, stage, microbatch)
    (span,) = [span for row in timeline.rows for span in row if span.action == action]
    return span


@pytest.mark.parametrize("devices", [["cuda:0"] * 4, DEVICES["four GPUs"]])
def test_the_sum_of_a_stage_waits_for_that_stage_alone(gpus: FakeCuda, devices: list[str]) -> None:
    case = CASES["mlp"](8)
    with pykern.Pipeline(
        case.layers, devices=devices, replicas=2, microbatches=8, loss_fn=case.loss_fn
    ) as pipe:
        pipe.step(case.inputs, target=case.target)
        with pipe.tracing():
            pipe.step(case.inputs, target=case.target)
        timeline = pipe.timeline()
    # The sum of the last stage runs while the first has a backward of either replica to come.
    reduce = span_of(timeline, Kind.REDUCE, 1, 0)
    assert reduce.end_ns > reduce.start_ns
    if len(set(devices)) == 1:
        # All on one clock.
        assert reduce.start_ns >= span_of(timeline, Kind.B, 1, 7).end_ns
        for last in (6, 7):
            assert reduce.end_ns < span_of(timeline, Kind.B, 0, last).end_ns
    # Every lane but those with a sum at their end runs as it would with one replica.
    for row, alone in ((2, 0), (3, 1)):
        ours = [(s.action.kind, s.action.stage) for s in timeline.rows[row]]
        theirs = [(s.action.kind, s.action.stage) for s in timeline.rows[alone]]
        assert ours == [each for each in theirs if each[0] is not Kind.REDUCE]


class Looks:
    """A driver that notes where everything is when a step would begin."""

    claim = nullcontext

    def ready(self) -> None:
        return

    def connect(self, replicas: Sequence[Sequence[Stage]], _: Plan) -> None:
        self.replicas = replicas
        self.arguments: list[list[Any]] = []
        self.keywords: list[list[Any]] = []

    def run(self, *_: Any, **__: Any) -> list[Any]:
        for replica in self.replicas:
            self.arguments.append([given and given[0].device for given in replica[0].arguments])
            self.keywords.append([named and named["bias"].device for named in replica[1].keywords])
        return []

    def where(self, device: int) -> str:
        return f"device {device}"

    def end(self) -> None:
        return

    def close(self) -> None:
        return


class Biased(nn.Linear):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is not None
        return super().forward(x) + bias


def test_a_replica_gets_its_microbatches_and_no_others_before_any_action() -> None:
    plan = with_replicas(schedules.gpipe(2, 2), 2, 3)
    layers = [nn.Linear(2, 2, device=META), Biased(2, 2, device=META)]
    stages = [Stage(number, [layer], META) for number, layer in enumerate(layers)]
    driver = Looks()
    executor = Executor(stages, plan, [META] * 4, driver)  # type: ignore[arg-type]
    call: Any = ((torch.ones(3, 2),), {"bias": torch.ones(3, 2)})
    assert executor.replicas.place(call, None)[0] is call
    executor.run(None, Batch(call, None, [1, 1, 1], lambda *_: ((), ())))  # type: ignore[arg-type]
    assert driver.arguments == [[META, None, META], [None, META, None]]
    assert driver.keywords == [[META, {}, META], [{}, META, {}]]
    targets = executor.replicas.place_targets(torch.ones(3, 2).split(1))
    assert [target.device for target in targets] == [META] * 3


def test_segments_of_a_replica_make_their_tensors_where_it_is() -> None:
    segment = Segment(0)
    stage = Stage(0, [segment], META)
    for device, expected in ((None, None), (torch.device("cpu"), META)):
        segment.device = device
        replica = Replica(stage, META)
        stage.begin(1, StepSeed(), lambda *_: ((), ()))
        replica.begin(1, StepSeed(), lambda *_: ((), ()))
        (copied,) = replica.layers
        assert copied is not segment
        assert isinstance(copied, Segment)
        assert copied.device == expected
        assert segment.device == device


def test_a_segment_copies_a_buffer_once_unless_writes_are_not_counted() -> None:
    """A buffer that was made in inference mode has no version: asking for that raised an error."""
    model, segment = nn.Module(), Segment(0)
    model.register_buffer("counted", torch.ones(2))
    with torch.inference_mode():
        model.register_buffer("uncounted", torch.ones(2))
    segment.device = META
    held = ["counted", "uncounted"]
    segment.hold_tensors([Held(name, is_parameter=False) for name in held], model)
    counted, uncounted = (segment.get_buffer(name) for name in held)
    segment.refresh()
    assert segment.get_buffer("counted") is counted
    assert segment.get_buffer("uncounted") is not uncounted
    model.get_buffer("counted").zero_()
    segment.refresh()
    assert segment.get_buffer("counted") is not counted
