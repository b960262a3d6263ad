"""`pykern.estimate`: what is held is predicted without weights, data or devices."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from bench.live import counted_bytes
from pykern import _C
from pykern.models import gpt, next_token_loss
from pykern.sizes.changes import PlannedStep, changes
from pykern.sizes.estimates import Bytes
from pykern.sizes.step_model import StepModel
from pykern.tensors.parameters import num_bytes
from tests.support.quantised import KINDS, quantise
from tests.torture.models import all_models
from tests.zoo.case import Case
from tests.zoo.flow import CASES


def mlp(num_layers: int = 4, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers))
    )


def small(**options: Any) -> pykern.sizes.Estimate:
    x = torch.empty(8, 64)
    given: dict[str, Any] = {
        "devices": 2,
        "microbatches": 4,
        "sample": x,
        "target": x,
        "loss_fn": F.mse_loss,
    }
    model = options.pop("model", None) or mlp()
    return pykern.estimate(model, **(given | options))


def measured(model: nn.Module, batch: Any, target: Any = None, **options: Any) -> list[float]:
    """Activations that devices hold at most in a step that adds to gradients, in bytes."""
    args, kwargs = batch if isinstance(batch, tuple) else ((batch,), {})
    with pykern.Pipeline(model, **options) as pipe:
        # Gradients are there from now on.
        pipe.step(*args, target=target, **kwargs)
        with counted_bytes(pipe) as live:
            pipe.step(*args, target=target, **kwargs)
    return [device.peak for device in live]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        *(("gpipe", None), ("zb_h1", None), ("interleaved", "stage")),
        *(("one_f_one_b", level) for level in (None, "layer", "stage")),
    ],
)
def test_a_gpt_holds_what_is_predicted(schedule: str, recompute: Any) -> None:
    ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": 4,
        "recompute": recompute,
        "loss_fn": next_token_loss,
    }

    def model() -> nn.Module:
        return gpt(vocab=32, layers=4, width=32, heads=2, context=16, seed=0)

    found = pykern.estimate(model(), devices=2, sample=ids[:2, :-1], target=ids[:2, 1:], **options)
    held = measured(model(), ids[:, :-1], ids[:, 1:], devices="cpu:2", **options)
    for device, most in zip(found.devices, held, strict=True):
        assert 0.98 * most <= device.activations <= 1.1 * most


# A decoder, an encoder with a decoder, a vision model and a state-space model.
FEW = ("transformers llama", "transformers t5", "transformers vit", "transformers mamba")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_models_of_transformers(name: str) -> None:
    case: Case = all_models()[name]()
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": case.loss_fn}
    sample = case.sample(case.rows // 4)
    found = pykern.estimate(case.model, devices=2, sample=sample, **options)
    held = measured(case.model, (case.args, case.kwargs), devices="cpu:2", sample=sample, **options)
    for device, most in zip(found.devices, held, strict=True):
        assert 0.98 * most <= device.activations <= 1.1 * most


def of_probabilities(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(output.sigmoid(), target)


@pytest.mark.parametrize("rows", [8, 4800])
@pytest.mark.parametrize(
    "loss_fn", [F.mse_loss, F.smooth_l1_loss, of_probabilities, F.soft_margin_loss]
)
def test_a_loss_that_has_the_memory_of_all_terms(loss_fn: Any, rows: int) -> None:
    x = torch.rand(2 * rows, 64)
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": 2, "loss_fn": loss_fn}
    found = small(devices=1, sample=x[:rows], target=x[:rows], **options)
    (held,) = measured(mlp(), x, x, devices="cpu:1", **options)
    assert found.devices[0].activations == pytest.approx(held, abs=16)


def test_writes_into_what_stages_share() -> None:
    case = CASES["in_place"]()
    found = pykern.estimate(
        case.model,
        devices=2,
        microbatches=4,
        sample=case.sample(2),
        loss_fn=case.loss_fn,
        target=None if case.target is None else case.target[:2],
    )
    assert all(device.activations > 0 for device in found.devices)


def test_a_model_on_meta_is_as_a_real_one() -> None:
    with torch.device("meta"):
        model, x = mlp(), torch.empty(8, 64)
    assert small(model=model, sample=x, target=x) == small()


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    small(model=model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("make", "times"),
    [(torch.optim.AdamW, 2.0), (torch.optim.SGD, 0.0), (torch.optim.RMSprop, 1.0)],
)
def test_parameters_and_what_belongs_to_them(
    make: Callable[..., torch.optim.Optimizer], times: float
) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    found = small(model=model, optimizer=lambda parameters: make(parameters, lr=0.1))
    one = 4 * (64 * 64 + 64)
    first, second = found.devices
    assert (first.parameters, second.parameters) == (2 * one, 2 * one)
    assert (first.gradients, second.gradients) == (one, 2 * one)
    # Adam also counts its steps, parameter by parameter.
    assert second.optimizer == pytest.approx(times * 2 * one, abs=4 * 4)
    assert first.optimizer == pytest.approx(times * one, abs=4 * 2)
    assert first.total == sum(
        (first.parameters, first.gradients, first.optimizer, first.activations, first.transfers)
    )


def test_transfers_are_slots_of_what_passes_between_devices() -> None:
    message = 8 * 64 * 4
    assert [device.transfers for device in small().devices] == [2 * message, 2 * message]
    assert [device.transfers for device in small(devices=1).devices] == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_count_their_bytes(kind: str) -> None:
    torch.manual_seed(0)
    quantised = [nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2)]
    for one in quantised:
        quantise(one, kind)
    model = nn.Sequential(nn.Linear(64, 64), quantised[0], nn.Linear(64, 64), quantised[1])
    before = copy.deepcopy(model)
    found = small(model=model, balance="layers")
    plain = 4 * (64 * 64 + 64)
    for one, device in zip(quantised, found.devices, strict=True):
        weights = sum(map(num_bytes, [*one.parameters(), *one.buffers()]))
        assert weights < 2 * 64 * 64
        assert (device.parameters, device.gradients) == (plain + weights, plain)
    x = torch.randn(8, 64)
    # Forwards that take something from a parameter have not taken it from the model's own.
    assert torch.equal(model(x), before(x))


def test_replicas_have_all_parameters() -> None:
    found = small(schedule="chimera")
    assert [device.parameters for device in found.devices] == [4 * 4 * (64 * 64 + 64)] * 2


def test_the_table_has_a_row_for_each_device() -> None:
    found = small()
    lines = str(found).splitlines()
    assert lines[0].split() == [
        *("KiB", "of", "device"),
        *("parameters", "gradients", "optimizer", "activations", "transfers", "total"),
    ]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1"]
    assert lines[1].split()[-1] == f"{found.devices[0].total / 1024:.3f}"


@pytest.mark.parametrize(("unit", "size"), [("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)])
def test_the_largest_number_of_bytes_chooses_the_unit(unit: str, size: int) -> None:
    found = small()
    held = [Bytes(size, size / 4, 0, 0, 0), Bytes(0, 0, 0, 0, 0)]
    head, first, second = str(replace(found, devices=held)).splitlines()
    assert head.split()[:3] == [unit, "of", "device"]
    assert first.split() == ["0", "1.000", "0.250", "0.000", "0.000", "0.000", "1.250"]
    assert second.split() == ["1", *["0.000"] * 6]


def test_changes_that_save_memory() -> None:
    x = torch.empty(64, 64)
    model = StepModel(mlp(8), 2, F.mse_loss, torch.optim.AdamW)
    step = PlannedStep(x, x, 4, None, model)
    before = step.estimate()
    found = dict(changes(step))
    assert list(found) == [
        "microbatches=8",
        "microbatches=16",
        "pykern.HostOptimizer",
        'recompute="layer"',
        'recompute="layer", microbatches=16',
        'recompute="stage"',
        'recompute="stage", microbatches=16',
    ]
    for estimate in found.values():
        assert estimate.devices[0].total < before.devices[0].total
    most = before.devices[0].total
    assert before.fits(most)
    assert not before.fits(most - 1)
    each = [device.total for device in before.devices]
    assert before.fits(each)
    wrongs: tuple[Any, ...] = (None, "4", [each[0], None])
    for wrong in wrongs:
        with pytest.raises(TypeError, match="memory must be a number, got "):
            before.fits(wrong)
    assert not before.fits([each[0] - 1, *each[1:]])
    with pytest.raises(ValueError, match="memory must be one for all, or a list"):
        before.fits([*each, most])


@pytest.mark.parametrize(
    ("level", "higher"),
    [("none", ["layer", "stage"]), ("layer", ["stage"]), ("stage", []), (["layer", None], [])],
)
def test_changes_go_on_from_the_level_of_the_step(level: Any, higher: list[str]) -> None:
    x = torch.empty(4, 64)
    step = PlannedStep(x, x, 4, level, StepModel(mlp(), 2, F.mse_loss))
    assert list(dict(changes(step))) == [f'recompute="{one}"' for one in higher]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_changes_measure_each_size_and_level_once(schedule: Any) -> None:
    calls: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    def step(microbatches: int, recompute: Any = None) -> PlannedStep:
        model = StepModel(layers, 2, F.mse_loss, torch.optim.AdamW, schedule)
        return PlannedStep(x, x, microbatches, recompute, model)

    layers, x = [Counting(64, 64) for _ in range(4)], torch.empty(64, 64)
    whole = step(4)
    whole.estimate()
    once = len(calls)
    found = dict(changes(whole))
    # Two more sizes, and four levels with R, where forwards run twice.
    assert len(calls) <= once + 2 * once + 4 * 2 * once
    # They are as measured apart.
    assert found["microbatches=8"] == step(8).estimate()
    for level in ("layer", "stage"):
        assert found[f'recompute="{level}"'] == step(4, level).estimate()
        both = found[f'recompute="{level}", microbatches=16']
        assert both == step(16, level).estimate()
    apart = replace(step(4).estimate(), devices=found["pykern.HostOptimizer"].devices)
    assert found["pykern.HostOptimizer"] == apart


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y if y.sum().item() > 0 else -y


def test_an_optimizer_for_captures_has_the_state_of_another() -> None:
    def for_captures(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, capturable=True)

    found = small(optimizer=for_captures)
    assert found.devices == small(optimizer=torch.optim.AdamW).devices


def test_what_cannot_be_known_is_an_error_with_a_note() -> None:
    with pytest.raises(Exception, match="_local_scalar_dense") as raised:
        small(model=Branching())
    told = "".join(raised.value.__notes__)
    assert "without values" in told
    assert "give pykern.estimate with_values=True" in told
    for made in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match="optimizer must step without values and without a"):
            small(optimizer=made)
    with pytest.raises(TypeError, match=r"optimizer must return a torch\.optim\.Optimizer"):
        small(optimizer=list)


def test_a_model_that_looks_at_values_is_computed() -> None:
    """It holds what the model holds that it branches to, and is left alone."""
    model, other, x = Branching(), mlp(), torch.rand(8, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"optimizer": torch.optim.AdamW, "sample": x, "target": x, "microbatches": 4}
    state = torch.get_rng_state()
    both = [small(model=[of], devices=1, with_values=True, **given) for of in (model, other)]
    looks, plain = (each.devices[0] for each in both)
    assert looks.parameters == plain.parameters
    assert looks.optimizer == plain.optimizer > 0
    # The sum, and a negative.
    assert 0 <= looks.activations - plain.activations <= 4 * x.nbytes
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_values_change_no_bytes(schedule: str, recompute: Any) -> None:
    model = nn.Sequential(mlp(3), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64))
    x = torch.rand(8, 64)
    given = {"schedule": schedule, "recompute": recompute, "optimizer": torch.optim.AdamW}
    both = [small(model=model, sample=x, target=x, with_values=of, **given) for of in (False, True)]
    assert both[0].devices == both[1].devices


def test_values_must_be_there() -> None:
    with pytest.raises(ValueError, match='with_values must be False for a model on "meta"'):
        small(model=mlp().to("meta"), with_values=True)
    with pytest.raises(ValueError, match='with_values must be False for a sample or target on "m'):
        small(sample=torch.rand(8, 64, device="meta"), with_values=True)


WRONG: list[tuple[str, Any, str]] = [
    ("devices", "cuda", "devices must be an int, got 'cuda'"),
    ("devices", 0, "devices must be 1 to 16777216, got 0"),
    ("sample", None, "sample must be the input of one microbatch, got None"),
    ("target", None, "target must be given for the loss .*, got None. Give it by target="),
    ("loss_fn", None, "loss_fn must be callable, got NoneType"),
    ("optimizer", "AdamW", "optimizer must be callable, got str.* a class of torch.optim"),
    ("balance", "time", "balance must not be 'time'"),
    ("recompute", pykern.Budget(1, sample=1), "recompute must be a level, got a Budget"),
    ("schedule", "forward_only", "schedule must have backwards, got 'forward_only'"),
    ("model", 3, "model must be an nn.Module or a list of them, got int"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[name for name, *_ in WRONG])
def test_wrong_arguments_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        small(**{name: value})


def test_autocast_for_gpus_counts_without_one() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = small().devices
    assert expected != small().devices
    with (
        _C.Undo(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda")),
        _C.Undo(torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda")),
    ):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        assert small().devices == expected


def test_a_sample_is_a_microbatch_of_some_rows() -> None:
    empty = torch.empty(0, 64)
    with pytest.raises(ValueError, match="the batch must have at least 1 row, got 0"):
        small(sample=empty, target=empty)
    with pytest.raises(ValueError, match="dimension 0"):
        small(target=empty)


def test_a_wrong_shape_is_an_error_without_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="64"):
        small(sample=torch.empty(8, 63))
    assert capfd.readouterr().err == ""
