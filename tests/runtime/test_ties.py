"""Stages that share parameters and modules: sums in the documented order, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.stage.stage import Stage
from pykern.runtime.stage.ties import Ties
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import Residual, Rows
from tests.runtime.plans import split_backward, two_replicas
from tests.runtime.test_transparency import PLANS_AT_COUNTS
from tests.runtime.tied_models import (
    WIDTH,
    batch,
    pipeline,
    require_bits,
    shared_by_many,
    tied_ends,
)
from tests.runtime.untied import Untied


@pytest.mark.parametrize("plan", PLANS_AT_COUNTS.values(), ids=PLANS_AT_COUNTS)
def test_every_bit_is_that_of_untied_copies_whose_sums_are_added(plan: Plan) -> None:
    case = shared_by_many(11)
    num_replicas = plan.placement.num_replicas
    with pipeline(case.layers, plan) as pipe:
        untied = Untied(case.layers, pipe.partition.stages)
        assert (untied.num_shared > 0) == (plan.num_stages > 1)
        for rows in (11, 3):
            require_bits(pipe, untied, case.inputs[:rows], case.target[:rows], num_replicas)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "chimera"])
def test_gradients_are_close_to_those_of_the_tied_model(name: str) -> None:
    case = shared_by_many(8)
    model = case.layers.double().eval()
    x, y = case.inputs.double(), case.target.double()
    plain = copy.deepcopy(model)
    with pipeline(model, schedules.by_name[name](4, 4)) as pipe:
        loss = pipe.step(x, target=y)
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_each_parameter_shows_once_and_the_model_is_left_alone() -> None:
    case = shared_by_many(8)
    model = case.layers
    modules, names = list(model.modules()), list(model.state_dict())
    values = [id(p) for p in model.parameters()]
    with pipeline(model) as pipe:
        pipe.step(case.inputs, target=case.target)
        for layers in (model, pipe):
            assert [id(p) for p in layers.parameters()] == values
            assert list(layers.state_dict()) == names
        assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def trained(plan: Plan, recompute: Any) -> list[Tensor]:
    torch.manual_seed(7)
    case = shared_by_many(11)
    with pipeline(case.layers, plan, recompute=recompute) as pipe:
        losses = [pipe.step(case.inputs, target=case.target) for _ in range(2)]
        return losses + [p.grad for p in pipe.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "plan",
    [schedules.zb_h1(2, 4), schedules.interleaved(2, 4, num_chunks=2), two_replicas(2, 4)],
    ids=["zb_h1", "interleaved", "replicas"],
)
def test_recompute_changes_no_bit(plan: Plan) -> None:
    expected = trained(plan, None)
    for recompute in ("layer", "stage"):
        for ours, theirs in zip(trained(plan, recompute), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_a_budget_chooses_for_stages_that_share() -> None:
    sample, target = batch(2)
    budget = pykern.Budget(1e6, sample, target)
    model = tied_ends()
    with pipeline(model, recompute=budget) as pipe:
        untied = Untied(model, pipe.partition.stages)
        require_bits(pipe, untied, *batch())


def test_stages_follow_what_is_done_to_the_model() -> None:
    """Optimizer steps, new storage, freezing and thawing."""
    model = tied_ends()
    first = model.get_parameter("0.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def move() -> None:
        first.data = first.detach() * 2

    changes: list[Callable[[], object]] = [
        optimizer.step,
        lambda: first.requires_grad_(False),
        lambda: first.requires_grad_(True),
        move,
        model.zero_grad,
    ]
    with pipeline(model) as pipe:
        untied = Untied(model, pipe.partition.stages)
        assert untied.num_shared == 1
        for change in changes:
            require_bits(pipe, untied, *batch())
            change()
            untied.follow()
        require_bits(pipe, untied, *batch())


def test_layers_may_be_tied_and_untied_after_the_pipeline_is_made() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pipeline(model) as pipe:
        model[1].weight = model[0].weight
        untied = Untied(model, pipe.partition.stages)
        assert untied.num_shared == 1
        require_bits(pipe, untied, *batch())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        pipe.load_state_dict(state, assign=True)
        assert model[1].weight is not model[0].weight
        untied = Untied(model, pipe.partition.stages)
        assert untied.num_shared == 0
        require_bits(pipe, untied, *batch())


def test_what_does_not_train_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing needs a copy")

    model = tied_ends()
    plain = copy.deepcopy(model)
    x, y = batch()
    monkeypatch.setattr("pykern.runtime.stage.ties.copy_layers", refuse)
    with pipeline(model) as pipe:
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([plain(part) for part in x.split(2)]))
        model.get_parameter("0.weight").requires_grad_(False)
        pipe.step(x, target=y)
        model.get_parameter("0.weight").requires_grad_(True)
        with pytest.raises(AssertionError, match="nothing needs a copy"):
            pipe.step(x, target=y)


def test_a_parameters_hooks_see_the_owners_microbatches_and_the_other_sums() -> None:
    model = tied_ends()
    weight = model.get_parameter("0.weight")
    seen: list[Tensor] = []
    collected: list[Tensor] = []

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        collected.append(parameter.grad.clone())

    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(keep)
    with pipeline(model) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
    assert len(seen) == len(collected) == 4 + 1
    assert torch.equal(collected[-1], sum(seen[1:], seen[0]))


@pytest.mark.parametrize("split", [False, True])
def test_recurrent_layers(split: bool) -> None:
    shared = Rows(WIDTH, WIDTH)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    plan = schedules.one_f_one_b(2, 4)
    with pipeline(model, split_backward(plan) if split else plan) as pipe:
        untied = Untied(model, pipe.partition.stages)
        assert untied.num_shared == 4
        require_bits(pipe, untied, *batch())


def test_a_sparse_gradient_meets_a_dense_one() -> None:
    embedding, head = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    plain = copy.deepcopy(model)
    ids, target = torch.randint(5, (2, 8))
    with pipeline(model, loss_fn=F.cross_entropy) as pipe:
        pipe.step(ids, target=target)
    F.cross_entropy(plain(ids), target).backward()
    torch.testing.assert_close(head.weight.grad, plain[1].weight.grad)


def test_gradients_that_collect_elsewhere_are_added_there() -> None:
    """As `main_grad` of float32 does for weights of bfloat16."""
    model = tied_ends()
    weight: Any = model.get_parameter("0.weight")
    weight.main_grad = torch.ones(WIDTH, WIDTH)

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            self.weight.main_grad += 1
            return x

    layers = nn.Sequential(*model, Collects())
    with pipeline(layers, balance=[1, 3]) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
    assert torch.equal(weight.main_grad, torch.full((WIDTH, WIDTH), 5.0))


class Own(nn.Module):
    """A forward of its own, which uses a module twice and a weight as well without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.block = Residual(WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.between(self.block(self.embedding(ids))))
        return F.linear(self.norm(x), self.embedding.weight)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_model_with_a_forward_of_its_own_may_share(num_devices: int) -> None:
    model = Own().double()
    plain = copy.deepcopy(model)
    ids, target = torch.randint(5, (2, 8))
    plan = schedules.zb_h1(num_devices, 4)
    additions: list[Tensor] = []
    model.embedding.weight.register_hook(additions.append)
    with pipeline(model, plan, sample=ids[:2], loss_fn=F.cross_entropy) as pipe:
        for _ in range(2):
            loss = pipe.step(ids, target=target)
            expected = F.cross_entropy(plain(ids), target)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
    # There is one for each microbatch of the first stage, and one for the last's sum, in both
    # steps.
    assert len(additions) == 2 * (4 + 1)


@pytest.mark.parametrize(
    "plan",
    [schedules.hanayo(2, 4, 1), schedules.zb_h1(2, 4), two_replicas(2, 4)],
    ids=["hanayo", "zb_h1", "replicas"],
)
def test_on_gpus_nothing_is_read_before_it_is_there(gpus: FakeCuda, plan: Plan) -> None:
    case = shared_by_many(8)
    names = [f"cuda:{device}" for device in range(plan.num_devices)]
    with pipeline(case.layers, plan, devices=names) as pipe:
        untied = Untied(case.layers, pipe.partition.stages)
        for _ in range(2):
            num_replicas = plan.placement.num_replicas
            require_bits(pipe, untied, case.inputs, case.target, num_replicas)
        assert pipe(case.inputs).shape == (8, WIDTH)


def test_copies_are_on_the_device_of_their_stage() -> None:
    """The meta device, which has shapes and no values, is the other one."""
    block, frozen = Residual(WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    block.register_buffer("mask", torch.ones(WIDTH))
    own = nn.Linear(WIDTH, WIDTH, device="meta")
    own.bias = frozen.bias
    stages = [
        Stage(0, [block, frozen], torch.device("cpu")),
        Stage(1, [nn.Sequential(block, own)], torch.device("meta")),
    ]
    ties = Ties(stages)
    for stage in stages:
        stage.begin(1, StepSeed(), lambda *_: ((), ()))
    with torch.no_grad():
        ties.begin()
    assert stages[0].layers is stages[0].originals
    (copied,) = stages[1].layers
    tensors = dict((*copied.named_parameters(), *copied.named_buffers()))
    assert list(tensors) == ["0.linear.weight", "0.linear.bias", "1.weight", "1.bias", "0.mask"]
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert tensors["1.weight"] is own.weight
    assert {tensor.device.type for tensor in block.state_dict().values()} == {"cpu"}
    stages[1].end()
    assert stages[1].layers is stages[1].originals
