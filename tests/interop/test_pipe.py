"""Models with a forward of their own: `pipeline`, `SplitPoint` and `pipe_split`."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from pykern.interop import pipelining
from pykern.interop.pipelining import SplitPoint, pipe_split, pipeline, ranks
from tests.interop.cases import CPU, WIDTH, batch, close, loss_fn


class Layer(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Uses its input and a value of its first layer again and again, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Any:
        start = self.embed(x)
        value = start if shift is None else start + shift
        for layer in self.layers:
            value = layer(value) + 0.1 * start
        return self.head(value * self.scale + x)


class Marked(Model):
    """Says itself where it is cut."""

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Any:
        start = self.embed(x)
        value = start if shift is None else start + shift
        for number, layer in enumerate(self.layers):
            if number == 2:
                pipe_split()
            value = layer(value) + 0.1 * start
        value = value * self.scale + x
        pipe_split()
        return self.head(value)


SPLITS = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.END}


def plain(model: nn.Module, x: Tensor, y: Tensor, shift: Tensor) -> tuple[Any, dict[str, Any]]:
    """Output and gradients of the whole batch."""
    model = deepcopy(model)
    output = model(x, shift=shift)
    loss_fn(output, y).backward()
    return output.detach(), {name: it.grad for name, it in model.named_parameters()}


def shifts() -> Tensor:
    return torch.linspace(-1.0, 1.0, 8).double()[:, None]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("model_class", "splits"), [(Model, SPLITS), (Marked, None)])
def test_a_step(name: str, model_class: type[Model], splits: Any) -> None:
    model, (x, y) = model_class().double(), batch()
    expected, gradients = plain(model, x, y, shifts())
    pipe = pipeline(model, (x[:2],), {"shift": shifts()[:2]}, split_spec=splits)
    assert pipe.num_stages == pipe.info().num_stages == 3
    assert all(int(seen) == 0 for seen in model.buffers())
    close(pipe(x, shift=shifts()), (expected,))
    stages = [pipe.build_stage(index, CPU) for index in range(3)]
    schedule = pipelining.get_schedule_class(name)(stages, 4, loss_fn=loss_fn)
    losses: list[Tensor] = []
    close(schedule.step(x, shift=shifts(), target=y, losses=losses), expected)
    assert len(losses) == 4
    close({name: it.grad for name, it in model.named_parameters()}, gradients)


def test_a_stage_has_the_names_and_parameters_of_the_model() -> None:
    model = Model()
    pipe = pipeline(model, (torch.randn(2, WIDTH),), split_spec=SPLITS)
    states = [pipe.get_stage_module(index).state_dict(keep_vars=True) for index in range(3)]
    assert [sorted({name.partition(".linear")[0] for name in state}) for state in states] == [
        ["embed.bias", "embed.weight", "layers.0", "layers.0.seen"],
        ["layers.1", "layers.1.seen", "layers.2", "layers.2.seen"],
        ["head.bias", "head.weight", "layers.3", "layers.3.seen", "scale"],
    ]
    whole = model.state_dict(keep_vars=True)
    found = {name: it for state in states for name, it in state.items()}
    assert found.keys() == whole.keys()
    assert all(found[name] is it for name, it in whole.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
def test_a_pipe_has_torchs_names() -> None:
    torchs = torch.distributed.pipelining.pipeline(
        Plain(), (torch.ones(2, WIDTH),), split_spec=HALF
    )
    ours = pipeline(Plain(), X_OF_TWO, split_spec=HALF)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    names = {name for name, _ in torchs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == names
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours(*X_OF_TWO)[0], torchs(*X_OF_TWO)[0])


def test_a_parameter_that_is_put_in_the_place_of_another_is_the_stages_too() -> None:
    model = Plain()
    x = torch.randn(8, WIDTH)
    pipe = pipeline(model, (x[:2],), split_spec=HALF)
    for _ in range(2):
        model.scale = nn.Parameter(torch.full((WIDTH,), 3.0))
        model.shift = torch.full((WIDTH,), 5.0)
        last = pipe.get_stage_module(1)
        assert last.state_dict(keep_vars=True)["scale"] is model.scale
        assert last.state_dict(keep_vars=True)["shift"] is model.shift
        assert any(parameter is model.scale for parameter in last.parameters())
        assert any(parameter is model.scale for parameter in pipe.parameters())
        model.scale = nn.Parameter(torch.full((WIDTH,), 4.0))
        assert torch.equal(pipe(x)[0], model(x))
        model.scale = nn.Parameter(torch.full((WIDTH,), 5.0))
        stage = pipe.get_stage_module(0)
        assert torch.equal(last(stage(x)), model(x))
        model.scale = nn.Parameter(torch.full((WIDTH,), 6.0))
        last.load_state_dict({**last.state_dict(), "scale": torch.full((WIDTH,), 7.0)})
        assert model.scale[0] == 7
        model.scale = nn.Parameter(torch.full((WIDTH,), 6.0))
        pipe.double()
        assert model.scale.dtype is torch.float64
        pipe.float()


@pytest.mark.parametrize("name", ["spare", "layers"])
def test_a_place_that_is_not_called_is_left_out_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=f"split_spec names '{name}', which the forward does not"):
        pipe = pipeline(
            Uncalled(), (torch.randn(2, WIDTH),), split_spec={**SPLITS, name: SplitPoint.END}
        )
    assert pipe.num_stages == 3


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
def test_it_is_cut_where_torch_cuts() -> None:
    x = torch.randn(2, WIDTH)
    for model, splits in ((Model(), SPLITS), (Marked(), None)):
        ours = pipeline(model, (x,), split_spec=splits)
        pipe = theirs.pipeline(deepcopy(model), (x,), split_spec=splits)
        assert pipe.num_stages == ours.num_stages
        for index in range(ours.num_stages):
            parameters, expected = (
                dict(each.get_stage_module(index).named_parameters()) for each in (ours, pipe)
            )
            assert parameters.keys() == expected.keys()
        close(ours(x), pipe(x))


def test_ranks_with_a_pipe_each() -> None:
    x, y = batch()
    torch.manual_seed(3)
    whole = Model().double()
    expected, gradients = plain(whole, x, y, shifts())

    def main() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(3)
        rank = ranks.get_rank()
        pipe = pipeline(Model().double(), (x[:2],), {"shift": shifts()[:2]}, SPLITS)
        stage = pipe.build_stage(rank, CPU)
        schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=loss_fn)
        output = schedule.step(target=y) if rank else schedule.step(x, shift=shifts())
        return output, {name: it.grad for name, it in stage.submod.named_parameters()}

    found = pipelining.run(main, 3)
    close(found[2][0], expected)
    close({name: grad for _, grads in found for name, grad in grads.items()}, gradients)


class Tied(nn.Module):
    """Uses one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, *, shift: Tensor) -> Any:
        return self.head(torch.tanh(self.layer(self.embed(x) + shift)))


def test_a_parameter_of_two_stages_gets_the_sum() -> None:
    # torch makes two of it, and adds nothing.
    model, (x, y) = Tied().double(), batch()
    _, gradients = plain(model, x, y, shifts())
    splits = {name: SplitPoint.BEGINNING for name in ("layer", "head")}
    pipe = pipeline(model, (x[:2],), {"shift": shifts()[:2]}, splits)
    stages = [pipe.build_stage(index, CPU) for index in range(3)]
    schedule = pipelining.ScheduleGPipe(stages, 4, loss_fn=loss_fn)
    schedule.step(x, target=y, shift=shifts())
    close({name: it.grad for name, it in model.named_parameters()}, gradients)


def test_hooks_of_a_stage_and_replaced_parameters_are_seen() -> None:
    model, (x, y) = Model().double(), batch()
    pipe = pipeline(model, (x[:2],), split_spec=SPLITS)
    stages = [pipe.build_stage(index, CPU) for index in range(3)]
    schedule = pipelining.ScheduleGPipe(stages, 2, loss_fn=loss_fn)
    seen: list[nn.Module] = []
    stages[1].submod.register_forward_hook(lambda module, *_: seen.append(module))
    schedule.step(x, target=y)
    assert len(seen) == 2
    model.scale = nn.Parameter(torch.zeros(WIDTH).double())
    close(schedule.eval(x), model.head(x).detach())


class Uncalled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.b(torch.relu(self.a(x))) * self.scale + self.shift
        return hidden


HALF = {"b": SplitPoint.BEGINNING}
X_OF_TWO = (torch.ones(2, WIDTH),)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            Model(),
            {"split_spec": SPLITS, "split_policy": print},
            "split_spec must be None beside split_policy, got both",
        ),
        (Model(), {"split_policy": print}, "split_policy must be None, got a function"),
        (Model(), {"split_spec": {"layers.9": SplitPoint.END}}, "'layers.9'"),
        (Model(), {"split_spec": {"layers.1": "MIDDLE"}}, "must be BEGINNING or END, got 'MIDDLE'"),
    ],
)
def test_misuse(model: nn.Module, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pipeline(model, (torch.randn(2, WIDTH),), **options)


def test_stages_that_are_not_there() -> None:
    pipe = pipeline(Marked(), (torch.randn(2, WIDTH),))
    with pytest.raises(ValueError, match="stage_idx must be 0 to 2, got 3"):
        pipe.get_stage_module(3)
