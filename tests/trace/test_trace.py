"""A recorded model does what the model does, bit for bit, whatever comes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.trace import CutError, ReplayError, Traced
from tests.trace.models import Given, Network


def replay(traced: Traced, *args: Any, **kwargs: Any) -> Any:
    (value,) = traced.environments([(args, kwargs)])
    for segment in traced.segments.values():
        value = segment(value)
    return value


def num_tapes(traced: Traced) -> int:
    return len([*traced._cut_tapes])


def gradients(model: nn.Module, output: Tensor) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    output.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_alike(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 10, (3, 5))


def test_values_and_gradients_are_the_models(tokens: Tensor) -> None:
    model = Network()
    mask = torch.rand(3, 5) > 0.5
    traced = Traced(model, ((tokens,), {"mask": mask}), 4)
    assert list(traced.segments) == [
        "embedding",
        "position",
        *(f"blocks.{i}" for i in range(4)),
        "norm",
    ]
    ours, theirs = replay(traced, tokens, mask=mask), model(tokens, mask=mask)
    assert ours.keys() == theirs.keys()
    assert ours["length"] == 5
    assert torch.equal(ours["all"], theirs["all"])
    assert_alike(gradients(model, ours["last"]), gradients(model, theirs["last"]))


def test_what_the_forward_reads_of_its_inputs_is_read_again(tokens: Tensor) -> None:
    model = Network()
    ones, some = (
        torch.ones(3, 5, dtype=torch.bool),
        torch.tensor([[True, False, True, True, False]] * 3),
    )
    traced = Traced(model, ((tokens,), {"mask": ones}), 2)
    for mask in (ones, some, ones, some):
        assert torch.equal(
            replay(traced, tokens, mask=mask)["all"], model(tokens, mask=mask)["all"]
        )
    # One for masks that are all true, which the forward does without, and one for others.
    assert num_tapes(traced) == 2


def test_other_shapes_values_and_modes_are_recorded_when_they_come(tokens: Tensor) -> None:
    model = Network()
    traced = Traced(model, ((tokens,), {}), 2)
    for count, given in enumerate((tokens, tokens[:2], tokens[:, :3]), start=1):
        for _ in range(2):
            assert torch.equal(replay(traced, given)["all"], model(given)["all"])
        assert num_tapes(traced) == count
    with torch.no_grad():
        assert not replay(traced, tokens)["all"].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(replay(traced, tokens)["all"], model(tokens)["all"])
    assert num_tapes(traced) == 5


def test_a_recording_leaves_no_trace() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), counting
            )

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.inner(x)

    counting = Counting(4, 4)
    model, x = Writing(), torch.randn(6, 4)
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    numbers = torch.get_rng_state()
    Traced(model, ((x,), {}), 2)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(x, given)
    assert counting.calls == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def written_in_place(model: Given, x: Tensor) -> Tensor:
    y = model.first(x)
    y += 1
    z = model.second(y)
    z[:, 0] = 0
    return model.third(z).relu_() + y


def under_modes(model: Given, x: Tensor) -> Tensor:
    y = model.first(x)
    with torch.no_grad():
        scale = y.abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        y = y @ y.T
    return model.third(model.second(y.float()[:, :4]) * scale)


def with_a_function_of_autograd(model: Given, x: Tensor) -> Tensor:
    return model.second(Doubled.apply(model.first(x)))


def of_trees(model: Given, x: Tensor) -> Any:
    parts = model.first(x).split(2, dim=1)
    largest, where = torch.max(model.second(torch.cat(parts[::-1], 1)), dim=1)
    return {"largest": (largest, None, 3), "where": where, "x": x[:, slice(0, parts[0].size(1))]}


def called_again(model: Given, x: Tensor) -> Tensor:
    return model.first(model.second(model.first(x)))


def of_parameters_alone(model: Given, x: Tensor) -> Tensor:
    x = F.linear(x, model.first.weight, model.first.bias)
    return F.linear(torch.tanh(x), model.second.weight)


class Doubled(torch.autograd.Function):
    """Its gradient is not what its forward would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


@pytest.mark.parametrize(
    "function",
    [
        written_in_place,
        under_modes,
        with_a_function_of_autograd,
        of_trees,
        called_again,
        of_parameters_alone,
    ],
)
def test_forwards_of_all_kinds_are_repeated(function: Any) -> None:
    model, x = Given(function), torch.randn(5, 4)
    traced = Traced(model, ((x.clone(),), {}), 2)
    ours, theirs = replay(traced, x.clone()), model(x.clone())
    if isinstance(ours, dict):
        assert ours["largest"][1:] == (None, 3)
        assert torch.equal(ours["where"], theirs["where"])
        assert torch.equal(ours["x"], theirs["x"])
        ours, theirs = ours["largest"][0], theirs["largest"][0]
    assert torch.equal(ours, theirs)
    assert_alike(gradients(model, ours), gradients(model, theirs))


def test_dropout_between_modules_draws_anew() -> None:
    model = Given(lambda self, x: F.dropout(self.second(self.first(x)), 0.5))
    x = torch.randn(5, 4)
    traced = Traced(model, ((x,), {}), 2)
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ours = replay(traced, x)
        torch.manual_seed(seed)
        assert torch.equal(ours, model(x))
        masks.append(ours == 0)
    assert not torch.equal(*masks)


def refused(function: Any) -> str:
    with pytest.raises(CutError) as caught:
        Traced(Given(function), ((torch.randn(5, 4),), {}), 2)
    return str(caught.value)


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.left = super().forward(x)
        return self.left * 2


def test_what_cannot_be_repeated_is_refused_with_its_line() -> None:
    def reads(model: Given, x: Tensor) -> Tensor:
        y = model.first(x)
        return model.second(y * 2 if y.sum() > 0 else y)

    def leaves(model: Given, x: Tensor) -> Tensor:
        model.left = model.first(x)
        return model.second(model.left)

    def checkpoints(model: Given, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(model.first, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return model.second(y)

    def checkpoints_reentrant(model: Given, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(model.first, model.third(x), use_reentrant=True)
        assert isinstance(y, Tensor)
        return model.second(y)

    assert "test_trace.py:" in refused(reads)
    assert "reads the values of a tensor (__bool__)" in refused(reads)
    assert "leaves a tensor in Given.left" in refused(leaves)
    assert "recompute='layer'" in refused(checkpoints)
    assert "recompute='layer'" in refused(checkpoints_reentrant)


def test_what_a_whole_module_leaves_aside_is_refused() -> None:
    def by_attribute(model: Given, x: Tensor) -> Tensor:
        return model.second(model.third(x)) + model.third.left

    model = Given(by_attribute)
    model.third = Keeps(4, 4)
    with pytest.raises(CutError, match="not seen"):
        Traced(model, ((torch.randn(5, 4),), {}), 2)


def test_a_module_that_leaves_tensors_aside_is_opened_for_them() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
            self.logits: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x)
            self.logits.append(logits)
            return self.expert(x) * logits.softmax(1)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Router() for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers:
                x = layer(x)
            collected = [layer.logits.pop() for layer in self.layers]  # type: ignore[operator, union-attr]
            return x, torch.stack(collected).square().mean()

    model, x = Sparse(), torch.randn(5, 4)
    traced = Traced(model, ((x,), {}), 2)
    ours, theirs = replay(traced, x), model(x)
    assert torch.equal(ours[0], theirs[0])
    assert_alike(gradients(model, ours[1]), gradients(model, theirs[1]))


def test_a_module_that_does_not_do_again_what_it_did_is_named() -> None:
    class Shrinks(nn.Linear):
        rows = 4

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[: self.rows]

    def looks(model: Given, x: Tensor) -> Tensor:
        y = model.third(x)
        return model.second(y.view(y.shape[0], -1))

    model, x = Given(looks), torch.randn(5, 4)
    model.third = Shrinks(4, 4)
    traced = Traced(model, ((x,), {}), 2)
    replay(traced, x)
    Shrinks.rows = 3
    with pytest.raises(
        ReplayError, match=r"third returned a tensor of shape \(3, 4\), and \(4, 4\)"
    ):
        replay(traced, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.register_forward_hook(lambda *_: None), "has hooks"),
        (lambda model: model.compile(backend="eager"), "is compiled as a whole"),
    ],
)
def test_a_model_that_must_stay_whole_is_refused(change: Any, message: str, tokens: Tensor) -> None:
    model = Network()
    change(model)
    with pytest.raises(CutError, match=message):
        Traced(model, ((tokens,), {}), 2)


def test_an_exported_program_can_be_cut() -> None:
    model, x = Network().eval(), torch.randint(0, 10, (3, 5))
    exported = torch.export.export(model, (x,)).module()
    traced = Traced(exported, ((x,), {}), 2)
    assert torch.equal(replay(traced, x)["all"], model(x)["all"])
    assert len(traced.segments) > 8
