"""`pipeline` cuts at marks: side by side, in front, at the end, and within nested modules."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from pykern.interop import pipelining
from pykern.interop.pipelining import SplitPoint, pipe_split, pipeline, ranks
from pykern.trace import CutError
from tests.interop.cases import CPU, WIDTH, batch, loss_fn

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * self.scale


class Adjacent(Three):
    """Nothing is between the marks, and a value of the first stage goes past them."""

    def forward(self, x: Tensor) -> Any:
        start = self.a(x)
        pipe_split()
        pipe_split()
        pipe_split()
        return self.c(torch.tanh(self.b(start))) + start * x


class NoModule(Three):
    """A stage without modules and without parameters."""

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        pipe_split()
        x = torch.tanh(x)
        pipe_split()
        return self.c(self.b(x))


class NoModules(Three):
    """Such stages in front and at the end, and one that has a parameter alone."""

    def forward(self, x: Tensor) -> Any:
        start = torch.sin(x)
        pipe_split()
        x = self.b(self.a(start))
        pipe_split()
        x = x * self.scale
        pipe_split()
        x = self.c(x)
        pipe_split()
        return torch.tanh(x) + start


class Outside(Three):
    """Marks in front of all and behind all, where torch makes no stage."""

    def forward(self, x: Tensor) -> Any:
        pipe_split()
        x = self.b(self.a(x))
        pipe_split()
        x = self.c(x)
        pipe_split()
        pipe_split()
        return x


class Again(Three):
    """Calls a module in two stages."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.c(self.a(x))


class Idle(Three):
    """A module between marks that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        pipe_split()
        x = self.idle(x)
        pipe_split()
        return self.c(self.b(x))


class Block(Three):
    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.b(x)


class Nested(nn.Module):
    """Marks within modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


class Both(Three):
    """A mark of the forward beside one of the spec."""

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        pipe_split()
        return self.c(x)


CASES: list[tuple[type[nn.Module], dict[str, SplitPoint] | None, int]] = [
    (Adjacent, None, 2),
    (NoModule, None, 3),
    (NoModules, None, 5),
    (Outside, None, 2),
    (Idle, None, 2),
    (Nested, None, 3),
    (Both, {"b": BEGINNING}, 3),
    (Three, {"a": END, "b": BEGINNING}, 3),
    (Three, {"a": BEGINNING, "c": END}, 2),
    (Three, {"c": BEGINNING, "b": BEGINNING}, 3),
    (Three, {}, 1),
]


def by_microbatch(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Output and gradients of the plain model over four microbatches."""
    model = deepcopy(model)
    outputs = []
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        output = model(part)
        (loss_fn(output, target) / 4).backward()
        outputs.append(output.detach())
    return torch.cat(outputs), {name: it.grad for name, it in model.named_parameters()}


def expect_same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
@pytest.mark.parametrize(("kind", "splits", "num_stages"), [*CASES, (Again, None, 2)])
def test_there_are_as_many_stages_as_in_torch(
    kind: type[nn.Module], splits: Any, num_stages: int
) -> None:
    x = torch.randn(2, WIDTH)
    model = kind()
    ours = pipeline(model, (x,), split_spec=splits)
    pipe = theirs.pipeline(deepcopy(model), (x,), split_spec=splits)
    assert ours.num_stages == pipe.num_stages == num_stages
    expect_same_bits(ours(x), pipe(x))
    # torch leaves gaps in the numbers where nothing is between two marks, and finds no stage there.
    stages = [stage for name, stage in pipe.split_gm.named_children() if "submod_pp" in name]
    for index, stage in enumerate(stages):
        names = {name.replace("@1", "") for name, _ in stage.named_parameters()}
        assert {name for name, _ in ours.get_stage_module(index).named_parameters()} == names


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
def test_torch_does_not_find_a_stage_behind_adjacent_marks() -> None:
    pipe = theirs.pipeline(Adjacent(), (torch.randn(2, WIDTH),))
    assert pipe.num_stages == 2
    with pytest.raises(AttributeError, match="submod_pp_1"):
        pipe.get_stage_module(1)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("kind", "splits", "num_stages"), CASES)
def test_a_step_gives_the_bits_of_the_plain_model(
    kind: type[nn.Module], splits: Any, num_stages: int, name: str
) -> None:
    torch.manual_seed(1)
    model, (x, y) = kind().double(), batch()
    expected, gradients = by_microbatch(model, x, y)
    pipe = pipeline(model, (x[:2],), split_spec=splits)
    stages = [pipe.build_stage(index, CPU) for index in range(num_stages)]
    schedule = pipelining.get_schedule_class(name)(stages, 4, loss_fn=loss_fn)
    expect_same_bits(schedule.eval(x), expected)
    expect_same_bits(schedule.step(x, target=y), expected)
    expect_same_bits({name: it.grad for name, it in model.named_parameters()}, gradients)


def test_a_rank_may_have_a_stage_without_parameters() -> None:
    x, y = batch()
    torch.manual_seed(1)
    expected, gradients = by_microbatch(NoModule().double(), x, y)

    def main() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(1)
        rank = ranks.get_rank()
        stage = pipeline(NoModule().double(), (x[:2],)).build_stage(rank, CPU)
        schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=loss_fn)
        output = schedule.step(target=y) if rank else schedule.step(x)
        return output, {name: it.grad for name, it in stage.submod.named_parameters()}

    found = pipelining.run(main, 3)
    expect_same_bits(found[2][0], expected)
    del gradients["scale"]
    expect_same_bits({name: it for _, each in found for name, it in each.items()}, gradients)


class ByMode(Three):
    """Has another number of marks in each mode."""

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        pipe_split()
        if not self.training:
            x = torch.tanh(x)
            pipe_split()
        return self.c(self.b(x))


def test_marks_that_the_sample_did_not_have_are_refused() -> None:
    model, x = ByMode(), torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 2
    model.eval()
    with pytest.raises(
        CutError, match=r"the forward calls pipe_split\(\) .* did not for the sample"
    ):
        pipe(x)


def test_marks_that_are_left_out_leave_a_stage_that_passes_values_on() -> None:
    model, x = ByMode().eval(), torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 3
    model.train()
    expect_same_bits(pipe(x), (model(x),))


class Returns(Three):
    """Returns what it is told to."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Any:
        return self.make(super().forward(x if shift is None else x + shift), x)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
@pytest.mark.parametrize(
    "make",
    [
        lambda y, _: y,
        lambda y, x: (y, x),
        lambda y, _: [y],
        lambda y, x: {"z": y.sum(), "a": (y, [x])},
        lambda y, _: (y, 3, None),
        lambda y, x: {"first": None, "rest": {"y": y, "x": x * 2}},
    ],
)
def test_a_call_returns_what_torchs_returns(make: Any) -> None:
    x, model = torch.randn(2, WIDTH), Returns(make)
    keywords = {"shift": torch.randn(2, WIDTH)}
    splits = {"b": BEGINNING}
    ours = pipeline(model, (x,), keywords, split_spec=splits)
    pipe = theirs.pipeline(deepcopy(model), (x,), dict(keywords), split_spec=splits)
    found, expected = ours(x, **keywords), pipe(x, **keywords)
    assert type(found) is type(expected) is tuple
    assert [type(leaf) for leaf in found] == [type(leaf) for leaf in expected]
    expect_same_bits(found, expected)
