"""`compile="stages"`: each stage is one compiled function, with the bits of a plain loop."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Kind
from pykern.runtime.features import compiled
from tests.fake_cuda.fake import FakeCuda
from tests.loop.loops import WIDTH, Block, assert_same, batch, plain_loop_step
from tests.outside.cases import plain
from tests.support.pipelines import small
from tests.support.plain_step import plain_step


class Own(nn.Module):
    """A forward of its own, which is recorded; the last stage is given a parameter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = x + block(x)
        return F.layer_norm(x + first, (WIDTH,), self.scale)


class Scaled(nn.Module):
    """Takes an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)) * scale


class Counting:
    """The backend "aot_eager", counting what is compiled and its forwards."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        made = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            return made(*arguments)

        return call


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    torch._dynamo.reset()
    counting = Counting()
    monkeypatch.setattr(compiled, "BACKEND", counting)
    yield counting
    torch._dynamo.reset()


def pipeline(model: Any, **options: Any) -> pykern.Pipeline:
    return small(model, **({"microbatches": 3} | options))


def blocks(rate: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(Block(rate) for _ in range(4)))


# torch's compiler asks every input for its gradient, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one_f_one_b": (blocks, {}),
    "zb_h1": (blocks, {"schedule": "zb_h1"}),
    "interleaved": (blocks, {"schedule": "interleaved", "num_chunks": 2}),
    "recompute": (blocks, {"recompute": "stage"}),
    "recompute of one stage": (blocks, {"recompute": ["stage", None]}),
    "recorded": (Own, {"sample": torch.ones(2, WIDTH)}),
    "recorded, recomputed": (Own, {"sample": torch.ones(2, WIDTH), "recompute": "stage"}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_have_the_bits_of_the_compiled_stages(name: str, counting: Counting) -> None:
    make, options = CASES[name]
    model = make()
    # Backend "aot_eager" runs the same operations, so that the plain model has the same bits.
    reference = copy.deepcopy(model)
    with pipeline(model, compile="stages", **options) as pipe:
        assert list(pipe.state_dict()) == list(reference.state_dict())
        num_recomputed = sum(action.kind is Kind.R for row in pipe.plan.rows for action in row)
        num_forwards = 3 * pipe.plan.num_stages + num_recomputed
        for _ in range(2):
            x, y = batch(6)
            before = counting.calls
            loss = pipe.step(x, target=y)
            assert counting.calls - before == num_forwards
            assert_same(pipe, reference, (loss, plain_loop_step(reference, x, y)))


@pytest.mark.parametrize("name", ["one_f_one_b", "recompute", "recorded"])
def test_a_loss_outside_and_forwards_alone(name: str, counting: Counting) -> None:
    make, options = CASES[name]
    layers = make()
    reference = copy.deepcopy(layers)
    with pipeline(layers, compile="stages", **options) as pipe:
        x, _ = batch(6)
        graphs = 0
        for _ in range(3):
            loss = pipe(x).square().mean()
            loss.backward()
            graphs = counting.graphs
            assert torch.equal(loss.detach(), plain(reference, x, 3, lambda y: y.square().mean()))
            assert_same(pipe, reference)
        # Parameters under other names are no other graphs.
        pipe(x).sum().backward()
        assert counting.graphs == graphs
        pipe.eval()
        reference.eval()
        with torch.no_grad():
            expected = torch.cat([reference(part) for part in x.split(2)])
            assert torch.equal(pipe(x), expected)
            assert all(torch.equal(found, expected) for found in pipe.stream([x, x]))


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "recompute", "recorded"])
def test_a_loss_that_comes_with_the_call(name: str, counting: Counting) -> None:
    make, options = CASES[name]
    layers = make()
    reference = copy.deepcopy(layers)
    x, y = batch(6)
    with pipeline(layers, compile="stages", **options) as pipe:
        for _ in range(2):
            results = pipe.map(F.mse_loss, x, target=y)
            expected = plain_loop_step(reference, x, y)
            first, *others = [result * (2 / 6) for result in results]
            assert torch.equal(sum(others, first), expected)
            assert_same(pipe, reference)
        assert counting.calls > 0


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_dropout_draws_what_it_draws_after_the_seed_of_its_action(recompute: Any) -> None:
    layers = blocks(0.5)
    reference = copy.deepcopy(layers)
    with pipeline(layers, compile="stages", recompute=recompute) as pipe:
        for _ in range(2):
            x, y = batch(6)
            state = torch.get_rng_state()
            loss = pipe.step(x, target=y)
            torch.set_rng_state(state)
            expected = plain_step(reference, x, y, F.mse_loss, 3, pipe.partition.stages)
            assert_same(pipe, reference, (loss, expected))
            torch.empty((), dtype=torch.int64).random_()


def test_layers_get_what_they_name() -> None:
    layers = nn.Sequential(Block(), Scaled(), Block(), Scaled())
    reference = copy.deepcopy(layers)
    with pipeline(layers, compile="stages") as pipe:
        x, y = batch(6)
        for scale in (0.5, 2.0):
            pipe.step(x, target=y, scale=scale)
            for part, target in zip(x.split(2), y.split(2), strict=True):
                value = reference[1](reference[0](part), scale=scale)
                value = reference[3](reference[2](value), scale=scale)
                (F.mse_loss(value, target) / 3).backward()
            assert_same(pipe, reference)


def test_stages_with_nothing_to_train_have_no_backward(counting: Counting) -> None:
    layers = blocks()
    for parameter in layers[:2].parameters():
        parameter.requires_grad_(False)
    reference = copy.deepcopy(layers)
    plan = schedules.one_f_one_b(2, 3).with_frozen([0])
    with pipeline(layers, compile="stages", schedule=plan, balance=[2, 2]) as pipe:
        x, y = batch(6)
        loss = pipe.step(x, target=y)
        assert counting.calls == 3 + 3
        assert_same(pipe, reference, (loss, plain_loop_step(reference, x, y)))


def test_each_of_many_stages_is_compiled(counting: Counting) -> None:
    """More than torch compiles of one function."""
    layers = nn.Sequential(*(Block() for _ in range(12)))
    x, y = batch(2)
    options: dict[str, Any] = {"schedule": "interleaved", "num_chunks": 6, "microbatches": 2}
    with pipeline(layers, compile="stages", **options) as pipe:
        pipe.step(x, target=y)
        before = counting.calls
        pipe.step(x, target=y)
        assert counting.calls - before == 2 * 12


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="compile must be one of False or 'stages', got True"):
        pipeline(blocks(), compile=True)
    tied: Any = blocks()
    tied[3].linear.weight = tied[0].linear.weight
    with pytest.raises(ValueError, match=r"3\.linear\.weight in stages 0 and 1"):
        pipeline(tied, compile="stages")


def test_gpus_are_refused(gpus: FakeCuda) -> None:
    with pytest.raises(ValueError, match="compile must be False on GPUs, got 'stages'"):
        pipeline(blocks(), compile="stages", devices=["cuda:0", "cuda:1"])


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_inductor_is_near_the_plain_model_and_the_same_in_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    x, y = batch(6)
    torch.manual_seed(0)
    found = [Own()]
    found += [copy.deepcopy(found[0]) for _ in range(2)]
    for layers in found[:2]:
        with pipeline(layers, compile="stages", sample=x[:2]) as pipe:
            pipe.step(x, target=y)
    assert_same(found[0], found[1])
    plain_loop_step(found[2], x, y)
    for mine, theirs in zip(found[0].parameters(), found[2].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
