"""Values that skip stages: the bits of the plain model, and nothing in the stages between."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Plan
from pykern.runtime.gpu.ring_transport import RingTransport, Way
from pykern.trace import Environment, Segment, Traced
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.conftest import expect_nothing_broken
from tests.runtime.plans import late_weights, recomputed, split_some, two_replicas
from tests.runtime.skip_models import (
    MODELS,
    Skips,
    ladder,
    pipeline,
    plain_output,
    plain_step,
    twin_of,
    unet,
    wide,
)
from tests.support.comparison import assert_same_state

PLANS: dict[str, Plan] = {
    "gpipe": schedules.gpipe(4, 4),
    "one_f_one_b": schedules.one_f_one_b(3, 5),
    "one_f_one_b of two": schedules.one_f_one_b(2, 4),
    "interleaved": schedules.interleaved(2, 4, 2),
    "hanayo": schedules.hanayo(2, 4, waves=1),
    "zb_h1": schedules.zb_h1(4, 6),
    "zb_v": schedules.zb_v(2, 5),
    "some split": split_some(schedules.one_f_one_b(4, 6)),
    "late weights": late_weights(schedules.one_f_one_b(4, 6)),
    "chimera": schedules.chimera(4, 4),
    "two replicas": two_replicas(3, 4),
}
# Updates within a step, and slices, need an executor that is not there yet.
NOT_YET = {"pipedream", "pipedream_2bw", "seq1f1b"}
SCHEDULES = sorted(schedules.by_name.keys() - NOT_YET - {"forward_only"})
WIDE_CUT = ["second", "third", "last"]


def gpus_of(plan: Plan) -> list[str]:
    return [f"cuda:{device}" for device in range(plan.num_devices)]


def check(case: Skips, plan: Plan, devices: Any, num_steps: int = 3, **options: Any) -> None:
    """Steps of the pipeline and of the plain model, equal to the bit, and their outputs.

    In the third step no stage is watched for random draws, and its segments run in one go.
    """
    plain = twin_of(case)
    count, replicas = plan.num_microbatches, plan.placement.num_replicas
    with pipeline(case, plan, devices, **options) as pipe:
        for _ in range(num_steps):
            expected = plain_step(plain, case, count, replicas)
            assert torch.equal(pipe.step(**case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)
        # With a graph, and a forward alone, where values go by way of the stages between.
        expected = plain_output(plain, case, count)
        assert torch.equal(pipe(**case.inputs), expected)
        with torch.no_grad():
            assert torch.equal(pipe(**case.inputs), expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_workers(name: str, model: str) -> None:
    plan = PLANS[name]
    check(MODELS[model](plan.num_microbatches + 1), plan, f"cpu:{plan.num_devices}")


ON_GPUS = [
    ("gpipe", "unet"),
    ("interleaved", "ladder"),
    ("hanayo", "encoder_decoder"),
    ("zb_v", "ladder"),
    ("late weights", "unet"),
    ("two replicas", "ladder"),
]


@pytest.mark.parametrize(("name", "model"), ON_GPUS)
def test_gpus(gpus: FakeCuda, name: str, model: str) -> None:
    plan = PLANS[name]
    check(MODELS[model](plan.num_microbatches), plan, gpus_of(plan))


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(gpus: FakeCuda, name: str, model: str) -> None:
    num_plans = 0
    for num_devices in (2, 3, 4):
        try:
            plan = schedules.by_name[name](num_devices, 12)
        except ValueError:
            continue
        num_plans += 1
        for devices in (f"cpu:{num_devices}", gpus_of(plan)):
            check(MODELS[model](12, plan.num_stages), plan, devices)
            expect_nothing_broken(gpus)
            gpus.reset(8)
            gpus.allow_undeclared()
    assert num_plans >= 2


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_recomputed(gpus: FakeCuda, level: Any) -> None:
    plan = recomputed(schedules.zb_h1(4, 5))
    check(ladder(5), plan, gpus_of(plan), recompute=level)


@pytest.mark.parametrize("capture", [True, "step"])
def test_captured(gpus: FakeCuda, capture: Any) -> None:
    """There they go by way of the stages between."""
    # In microbatches of 4 rows each begins at a multiple of 16 bytes, as copies of them do.
    plan = schedules.one_f_one_b(4, 4)
    check(unet(16), plan, gpus_of(plan), 3, capture=capture)


@pytest.mark.parametrize("ends", [(0, 3), (3, 0), (0, 1)])
@pytest.mark.filterwarnings("ignore:pykern. these devices")
def test_without_access(gpus: FakeCuda, ends: tuple[int, int]) -> None:
    gpus.set_peer(*ends, False)
    plan = schedules.zb_h1(4, 5)
    check(unet(5), plan, gpus_of(plan))
    # By the driver, which takes them through the host where it must, and tells nobody.
    assert gpus.staged_copies == 0


def test_parts_of_one_gpu(gpus: FakeCuda) -> None:
    check(unet(4), schedules.one_f_one_b(4, 4), "cuda:0/4")


def test_copies_go_from_the_maker_to_the_reader(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[tuple[int, int, int]] = Counter()
    send = RingTransport._send

    def noted(self: Any, way: Way, microbatch: int, tensor: Tensor, index: int) -> Tensor:
        sent[self._stage, way.ring.lane, tensor.size(-1)] += 1
        return send(self, way, microbatch, tensor, index)

    monkeypatch.setattr(RingTransport, "_send", noted)
    plan = schedules.one_f_one_b(4, 4)
    case = wide(4)
    with pipeline(case, plan, gpus_of(plan), WIDE_CUT) as pipe:
        before = gpus.calls("cuMemcpyAsync")
        pipe.step(**case.inputs, target=case.target)
        copies = gpus.calls("cuMemcpyAsync") - before
    chain = [(stage, stage + 1, 6) for stage in range(3)]
    chain += [(high, low, width) for low, high, width in chain]
    assert sent == dict.fromkeys([*chain, (0, 3, 7), (3, 0, 7)], 4)
    assert copies == 8 * 4


@pytest.mark.parametrize("train", [True, False])
def test_stages_between_do_not_see_them(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    seen: dict[str, set[int]] = {}
    forward = Segment.forward

    def noted(self: Segment, env: Environment) -> Any:
        name = next(iter(self._modules))
        seen.setdefault(name, set()).update(v.size(-1) for v in env.values.values())
        return forward(self, env)

    monkeypatch.setattr(Segment, "forward", noted)
    case = wide(8)
    with pipeline(case, schedules.one_f_one_b(4, 4), "cpu:4", WIDE_CUT) as pipe:
        if train:
            pipe.step(**case.inputs, target=case.target)
        else:
            pipe(**case.inputs)
    assert seen == {"first": {6}, "aside": {6}, "second": {6}, "third": {6}, "last": {6, 7, 9}}


def test_inputs_get_their_gradients() -> None:
    """Used by all stages, added up in the order of the plain model."""
    case = MODELS["dense"](9)
    plain = twin_of(case)
    x = case.inputs["x"].requires_grad_()
    case.inputs["x"] = x.detach().requires_grad_()
    plain_step(plain, case, 4)
    expected = case.inputs["x"].grad
    case.inputs["x"] = x
    with pipeline(case, schedules.zb_h1(4, 4), "cpu:4") as pipe:
        pipe.step(**case.inputs, target=case.target)
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def _make_fail(layer: nn.Module, made: list[Any]) -> Callable[[], None]:
    def fail(_: Any, given: Any) -> None:
        made.append(weakref.ref(given[0]))
        raise ArithmeticError

    return layer.register_forward_pre_hook(fail).remove


@pytest.mark.parametrize("devices", ["cpu:4", "cuda"])
def test_nothing_is_held_after_a_step_that_failed(gpus: FakeCuda, devices: str) -> None:
    plan = schedules.one_f_one_b(4, 4)
    case = wide(4)
    plain = twin_of(case)
    made: list[Any] = []
    names = devices if devices == "cpu:4" else gpus_of(plan)
    model: Any = case.model
    remember = model.last.register_forward_pre_hook(lambda _, given: made.append(_ref(given[0])))
    with pipeline(case, plan, names, WIDE_CUT) as pipe:
        remove = _make_fail(model.third, made)
        with pytest.raises(ArithmeticError):
            pipe.step(**case.inputs, target=case.target)
        remove()
        gc.collect()
        assert made
        assert all(ref() is None for ref in made)
        for stage in pipe._executor._stages:
            parcels = stage.parcels
            assert not parcels.come
            assert not parcels.opened
            assert not parcels.answers
        remember.remove()
        pipe.zero_grad()
        expected = plain_step(plain, case, 4)
        assert torch.equal(pipe.step(**case.inputs, target=case.target), expected)
        assert_same_state(pipe, plain)


def test_a_step_sends_nothing_of_one_that_failed(gpus: FakeCuda) -> None:
    """Stage 2 has the GPU of stage 1, and sends for both when all microbatches are through 1."""
    rows = [
        [
            Action(kind, stage, microbatch)
            for kind, stages in ((Kind.F, there), (Kind.B, there[::-1]))
            for stage in stages
            for microbatch in range(2)
        ]
        for there in ((0, 3), (1, 2))
    ]
    plan = Plan(schedules.hanayo(2, 2).placement, 2, rows)
    case = ladder(4)
    blocks: Any = case.model.blocks
    copies = set()
    with pipeline(case, plan, gpus_of(plan)) as pipe:
        for block in blocks:
            second: Any = Mock(side_effect=[None, ArithmeticError])
            handle = block.register_forward_pre_hook(lambda *_, second=second: second())
            with pytest.raises(ArithmeticError):
                pipe.step(**case.inputs, target=case.target)
            handle.remove()
            before = gpus.calls("cuMemcpyAsync")
            pipe.step(**case.inputs, target=case.target)
            copies.add(gpus.calls("cuMemcpyAsync") - before)
    assert len(copies) == 1


def _ref(tensor: Tensor) -> Any:
    return weakref.ref(tensor)


def test_a_budget_runs_its_sample_through_them() -> None:
    case = unet(8)
    sample = {name: value[:2] for name, value in case.inputs.items()}
    budget = pykern.Budget(1e9, sample, case.target[:2])
    check(case, schedules.one_f_one_b(4, 4), "cpu:4", recompute=budget)


class Lazy(nn.Module):
    """Copies its argument while there is a reason to, else returns it."""

    reasons: ClassVar[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if self.reasons else x


class Repeats(nn.Module):
    """The last block uses a tensor, under its second name between uses of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.lazy = Lazy()
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first.weight.sum()
        same = self.lazy(x)
        return self.last(x * 1.1) + torch.sin(same * 0.7) + torch.cos(x * 1.3) + same * 0.3


@pytest.mark.parametrize("devices", ["cpu:2", "cuda"])
def test_a_tensor_that_occurs_twice_stays_one(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    plan = schedules.one_f_one_b(2, 4)
    case = Skips(Repeats(), {"x": torch.randn(16, 6)}, torch.randn(16, 6))
    plain = twin_of(case)
    names = devices if devices == "cpu:2" else gpus_of(plan)
    monkeypatch.setattr(Lazy, "reasons", ["recorded"])
    with pipeline(case, plan, names, ["last"], whole=["lazy"]) as pipe:
        # The first two steps are recorded, and have two tensors.
        for number in range(4):
            if number == 2:
                Lazy.reasons.clear()
            expected = plain_step(plain, case, 4)
            assert torch.equal(pipe.step(**case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("model", ["dense", "unet"])
def test_a_batch_keeps_its_values(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The step holds the batch, and would hold to its end what later stages left in it."""
    given: list[tuple[Environment, dict[int, Any]]] = []
    enter = Traced.environments

    def noted(self: Traced, calls: Any) -> list[Environment]:
        entered = enter(self, calls)
        given.extend((env, env.values.copy()) for env in entered)
        return entered

    monkeypatch.setattr(Traced, "environments", noted)
    case = MODELS[model](8)
    with pipeline(case, schedules.one_f_one_b(2, 4), "cpu:2") as pipe:
        for _ in range(3):
            pipe.step(**case.inputs, target=case.target)
    assert len(given) == 3 * 4
    for env, values in given:
        assert env.values.keys() == values.keys()
        assert all(env.values[number] is values[number] for number in values)
