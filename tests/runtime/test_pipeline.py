"""Pipeline as a user meets it: a module, its names, and what it refuses."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Placement, Plan, PlanError


def named_model() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            embed=nn.Linear(3, 4),
            norm=nn.BatchNorm1d(4),
            body=nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
            head=nn.Linear(4, 2),
        )
    )


def test_names_and_state_are_the_models_own() -> None:
    model = named_model()
    fresh = copy.deepcopy(model)
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2) as pipe:
        assert isinstance(pipe, nn.Module)
        assert list(pipe.state_dict()) == list(fresh.state_dict())
        assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in fresh.named_parameters()]
        assert pipe.get_parameter("body.0.weight") is model.get_parameter("body.0.weight")
        pipe.load_state_dict({k: torch.ones_like(v) for k, v in fresh.state_dict().items()})
        assert all(bool((p == 1).all()) for p in model.parameters())


def test_train_and_eval_reach_the_layers() -> None:
    model = named_model()
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2) as pipe:
        assert pipe.training
        assert pipe.eval() is pipe
        assert not model.get_submodule("norm").training
        assert pipe.train().training
        assert model.get_submodule("norm").training
    with pykern.Pipeline(model.eval(), devices="cpu:2", microbatches=2) as pipe:
        assert not pipe.training


def test_a_list_of_modules_is_numbered() -> None:
    with pykern.Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)], devices=["cpu", "cpu"], microbatches=2
    ) as pipe:
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_schedule_may_be_a_name_a_function_or_a_plan() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    plan = schedules.by_name["hanayo"](2, 3, waves=1)
    by_name = pykern.Pipeline(layers, devices="cpu:2", schedule="hanayo", microbatches=3, waves=1)
    by_function = pykern.Pipeline(
        layers, devices="cpu:2", schedule=schedules.hanayo, microbatches=3, waves=1
    )
    by_plan = pykern.Pipeline(layers, devices="cpu:2", schedule=plan)
    for pipe in (by_name, by_function, by_plan):
        with pipe:
            assert pipe.plan == plan
            assert pipe(torch.ones(5, 2)).shape == (5, 2)


def test_the_first_layer_may_take_several_arguments() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, y: dict[str, Tensor], factor: float) -> Tensor:
            return x + factor * y["value"]

    with pykern.Pipeline([Add(), nn.Identity()], devices="cpu:2", microbatches=2) as pipe:
        x, y = torch.ones(5, 2), torch.arange(10.0).view(5, 2)
        assert torch.equal(pipe(x, {"value": y}, 2.0), x + 2 * y)


def test_a_loss_without_target_gets_the_output_alone() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pykern.Pipeline(
        layers, devices="cpu:2", microbatches=2, loss_fn=lambda output: output.square().mean()
    ) as pipe:
        loss = pipe.step(torch.ones(4, 2))
        assert loss.dim() == 0
        assert not loss.requires_grad


def test_inputs_that_require_grad_get_theirs() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = copy.deepcopy(layers)
    x = torch.randn(4, 2, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=torch.zeros(4, 2))
    F.mse_loss(plain(reference), torch.zeros(4, 2)).backward()
    torch.testing.assert_close(x.grad, reference.grad)


def test_an_output_that_nothing_uses_sends_no_gradient_back() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0]

    both = Both()
    with pykern.Pipeline(
        [both, First()], devices="cpu:2", microbatches=2, loss_fn=F.mse_loss
    ) as pipe:
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert both.used.weight.grad is not None
    assert both.unused.weight.grad is None


def test_parameters_shared_inside_a_stage_are_fine() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared, nn.Linear(2, 2))
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=1, loss_fn=F.mse_loss, balance=[2, 1]
    ) as pipe:
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
        assert list(pipe.state_dict()) == list(plain.state_dict())
    F.mse_loss(plain(torch.ones(4, 2)), torch.ones(4, 2)).backward()
    assert torch.equal(shared.weight.grad, plain[0].weight.grad)  # type: ignore[arg-type]


def test_constants_may_be_shared_between_stages() -> None:
    mask = torch.tensor([1.0, 0.0])

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", mask)

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * mask

    with pykern.Pipeline([Masked(), Masked()], devices="cpu:2", microbatches=1) as pipe:
        assert bool((pipe(torch.ones(4, 2))[:, 1] == 0).all())


def test_timelines_cover_the_plan() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    with pykern.Pipeline(
        layers, devices="cpu:2", schedule="hanayo", microbatches=3, loss_fn=F.mse_loss
    ) as pipe:
        with pytest.raises(RuntimeError, match="no timeline yet"):
            pipe.timeline()
        pipe.step(torch.ones(3, 2), target=torch.ones(3, 2))
        for timeline in (pipe.timeline(), pipe.prediction()):
            ran = [[span.action for span in row] for row in timeline.rows]
            assert ran == [list(row) for row in pipe.plan.rows]
            assert 0 <= timeline.bubble_ratio < 1
        pipe(torch.ones(3, 2))
        forward = pipe.plan.forward_only()
        for timeline in (pipe.timeline(), pipe.prediction()):
            assert [len(row) for row in timeline.rows] == [len(row) for row in forward.rows]


def test_a_timeline_is_of_a_step_that_has_ended() -> None:
    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not first:
                seen.append([len(row) for row in pipe.timeline().rows])
            return x

    first = True
    seen: list[list[int]] = []
    with pykern.Pipeline([nn.Identity(), Look()], devices="cpu:2", microbatches=3) as pipe:
        pipe(torch.ones(3, 2))
        first = False
        pipe(torch.ones(3, 2))
    assert seen == [[3, 3]] * 3


def test_earlier_steps_can_be_looked_at() -> None:
    with pykern.Pipeline(
        [nn.Linear(2, 2)], devices="cpu:1", microbatches=2, loss_fn=F.mse_loss
    ) as pipe:
        spans = []
        for _ in range(3):
            pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
            spans.append(pipe.timeline().rows)
        assert [pipe.timeline(ago).rows for ago in (2, 1, 0)] == spans
        for ago, rule in (3, "below 3, the number of traced steps"), (-1, "at least 0"):
            with pytest.raises(IndexError, match=f"ago must be {rule}, got {ago}"):
                pipe.timeline(ago)


LINEAR = [nn.Linear(2, 2), nn.Linear(2, 2)]
GOOD: dict[str, Any] = {"model": LINEAR, "devices": "cpu:2", "microbatches": 2}


class Custom(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def hooked_model() -> nn.Sequential:
    model = nn.Sequential(*LINEAR)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"devices": "cpu:0"}, ValueError, "1 to 256"),
        ({"devices": "cpu:257"}, ValueError, "1 to 256"),
        ({"devices": "cpu:-1"}, ValueError, "unknown: use 'cpu:N'"),
        ({"devices": "cpu:٣"}, ValueError, "unknown: use 'cpu:N'"),
        ({"devices": "tpu"}, ValueError, "unknown: use 'cpu:N'"),
        ({"devices": []}, ValueError, "devices must hold at least one, got an empty list"),
        ({"devices": 4}, TypeError, "a list of devices, got 4. Write for example 'cpu:4'"),
        ({"schedule": "gpip"}, ValueError, r"one of .* 'gpipe', .*, got 'gpip'. Did"),
        ({"schedule": "gpipe", "waves": 2}, TypeError, "waves"),
        ({"schedule": schedules.gpipe(2, 2), "waves": 2}, TypeError, "left out beside a Plan, got"),
        (
            {"schedule": schedules.gpipe(3, 2)},
            ValueError,
            "devices must be 3, as in the plan, got 2",
        ),
        ({"schedule": schedules.gpipe(2, 4)}, ValueError, "microbatches must be 4, as in the plan"),
        ({"microbatches": None}, TypeError, "microbatches must be given, got None"),
        ({"microbatches": 0}, ValueError, "^microbatches must be 1 to 16777216, got 0"),
        ({"microbatches": 2.5}, TypeError, "^microbatches must be an int, got 2.5"),
        ({"reduction": "none"}, ValueError, "'mean' or 'sum', got 'none'"),
        ({"deferred_batch_norm": "no"}, TypeError, "deferred_batch_norm must be True or"),
        ({"model": nn.Linear(2, 2)}, TypeError, "Linear, whose own forward is recorded, got None"),
        ({"model": Custom(*LINEAR)}, TypeError, "Custom, whose own forward is recorded, got None"),
        ({"model": hooked_model()}, TypeError, "run once it is cut, got a Sequential with some"),
        ({"model": [nn.Linear(2, 2), F.relu]}, TypeError, "layer 1 must be an nn.Module, got"),
        ({"model": LINEAR, "devices": "cpu:3"}, ValueError, "3 layers, one for each stage, got 2"),
        (
            {"model": nn.Sequential(OrderedDict(step=LINEAR[0], b=LINEAR[1]))},
            ValueError,
            "names of layers must differ from those that Pipeline uses itself, got 'step'",
        ),
        (
            {"model": nn.Sequential(OrderedDict(a=LINEAR[0], plan=LINEAR[1]))},
            ValueError,
            "names of layers must differ from those that Pipeline uses itself, got 'plan'",
        ),
        (
            {"model": [nn.Linear(2, 2, device="meta")] * 2},
            ValueError,
            "0.weight must be on .* got meta",
        ),
        (
            {"model": [nn.BatchNorm1d(2, affine=False)] * 2},
            ValueError,
            r"0.running_mean \(stage 0\) and 1.running_mean \(stage 1\) must be two buffers",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {**GOOD, **changes}
    with pytest.raises(error, match=message):
        pykern.Pipeline(arguments.pop("model"), **arguments)


def test_a_plan_that_cannot_run_is_refused() -> None:
    broken = Plan(Placement.linear(1), 1, [[]])
    with pytest.raises(PlanError):
        pykern.Pipeline([nn.Linear(2, 2)], devices="cpu:1", schedule=broken)


def test_a_plan_of_forwards_predicts_but_does_not_train() -> None:
    plan = schedules.gpipe(2, 2).forward_only()
    x = torch.ones(4, 2)
    with pykern.Pipeline(LINEAR, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        assert pipe(x).shape == (4, 2)
        with pytest.raises(RuntimeError, match="must have backwards for step, got forwards only"):
            pipe.step(x, target=x)


def test_a_pipeline_in_another_is_refused() -> None:
    """Its result has no graph, so the layers before it got no gradients, silently."""
    with pykern.Pipeline(LINEAR, devices="cpu:2", microbatches=2) as inner:
        for model, name in ((inner, "the model"), ([nn.Linear(2, 2), nn.Sequential(inner)], "0")):
            with pytest.raises(
                TypeError, match=rf"got a Pipeline \({name}\), whose forward has no back"
            ):
                pykern.Pipeline(model, devices="cpu:2", microbatches=2)


def test_steps_that_cannot_work_are_refused_before_they_start() -> None:
    calls: list[int] = []

    class Count(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(input)

    x = torch.ones(4, 2)
    with (
        pykern.Pipeline([Count(2, 2), Count(2, 2)], devices="cpu:2", microbatches=2) as pipe,
        pytest.raises(RuntimeError, match="loss_fn must be given for step, got None"),
    ):
        pipe.step(x, target=x)
    with pykern.Pipeline(
        [Count(2, 2), Count(2, 2)], devices="cpu:2", microbatches=2, loss_fn=F.mse_loss
    ) as pipe:
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="grad mode must be on in step, got off"),
        ):
            pipe.step(x, target=x)
        with pytest.raises(pykern.SplitError, match="have, 4, got 3"):
            pipe.step(x, target=x[:3])
        with pytest.raises(RuntimeError, match=r"run backward, got shape .* with MmBackward0"):
            pipe.step(x @ nn.Parameter(torch.ones(2, 2)), target=x)
        with pytest.raises(pykern.SplitError, match="0 to cut into microbatches, got none"):
            pipe(3)
    assert calls == []


def test_a_layer_that_was_replaced_is_named() -> None:
    with pykern.Pipeline(named_model(), devices="cpu:2", microbatches=2) as pipe:
        x = torch.ones(4, 3)
        body = pipe.get_submodule("body")
        assert isinstance(body, nn.Sequential)
        body[0] = nn.Linear(4, 4)
        pipe(x)
        head = pipe.head
        pipe.head = nn.Linear(4, 2)
        with pytest.raises(RuntimeError, match="layer 'head' was replaced"):
            pipe(x)
        pipe.head = head
        pipe(x)


@pytest.mark.parametrize("loss", [lambda output, _: output, lambda *_: 3.0], ids=["rows", "number"])
def test_a_loss_that_is_none_is_named(loss: Any) -> None:
    with (
        pykern.Pipeline(LINEAR, devices="cpu:2", microbatches=2, loss_fn=loss) as pipe,
        pytest.raises(ValueError, match="loss_fn must return a tensor without dimensions"),
    ):
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_a_complex_loss_is_refused_before_any_backward() -> None:
    """As torch does: it has no one gradient to begin with."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(4, 2)
    with (
        pykern.Pipeline(
            model, devices="cpu:2", microbatches=2, loss_fn=lambda y: torch.complex(y, y).sum()
        ) as pipe,
        pytest.raises(ValueError, match=r"must return a real tensor .*, got torch\.complex64"),
    ):
        pipe.step(x)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_a_loss_that_trains_nothing_is_named(schedule: str) -> None:
    layers = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    with (
        pykern.Pipeline(
            layers, devices="cpu:2", schedule=schedule, microbatches=2, loss_fn=F.mse_loss
        ) as pipe,
        pytest.raises(
            RuntimeError,
            match="the loss of microbatch 0 must require grad, got one that depends on nothing "
            "that trains",
        ),
    ):
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_a_way_out(copied: Callable[[object], object]) -> None:
    with (
        pykern.Pipeline([nn.Linear(2, 2)], devices="cpu:1", microbatches=1) as pipe,
        pytest.raises(TypeError, match=r"a Pipeline cannot be copied or pickled.*state_dict"),
    ):
        copied(pipe)


def test_a_model_that_is_not_a_module_is_refused() -> None:
    for model in (3, nn.Linear):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module or a list of them, got"):
            pykern.Pipeline(model, devices="cpu:2", microbatches=2)  # type: ignore[arg-type]
