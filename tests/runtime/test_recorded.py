"""Models with a forward of their own, in a pipeline."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.torch_private import has_live_graph
from pykern.trace import CutError
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import (
    assert_all_have_gradients,
    assert_same_gradients,
    assert_same_state,
)
from tests.support.pipelines import small
from tests.support.plain_step import Seed, by_microbatch
from tests.trace.models import Given, Network

ROWS = 2
X = torch.zeros(2, 5, dtype=torch.long)


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["last"].mean(-1) - target).square().mean()


def example(rows: int = 8) -> dict[str, Any]:
    return {"tokens": torch.randint(0, 10, (rows, 5)), "mask": torch.rand(rows, 5) > 0.3}


def pipeline(model: nn.Module, **options: Any) -> pykern.Pipeline:
    usual = {"microbatches": 4, "loss_fn": loss_of, "sample": example(ROWS)}
    return small(model, **(usual | options))


def plain_step(model: nn.Module, given: dict[str, Tensor], target: Tensor) -> Tensor:
    targets = target.split(ROWS)
    columns = {name: value.split(ROWS) for name, value in given.items()}

    def loss_at(index: int, _: Seed) -> Tensor:
        inputs = {name: parts[index] for name, parts in columns.items()}
        return loss_of(model(**inputs), targets[index])

    return by_microbatch(model, [len(part) for part in targets], loss_at)


def assert_steps_alike(pipe: pykern.Pipeline, plain: nn.Module, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        given, target = example(), torch.randn(8)
        assert torch.equal(pipe.step(**given, target=target), plain_step(plain, given, target))
        assert_same_gradients(pipe, plain)
        assert_all_have_gradients(plain)


def test_neither_the_recording_nor_a_step_leaves_a_graph_to_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        with pipeline(Network(num_blocks=2)) as pipe:
            assert not any(map(has_live_graph, pipe.parameters()))
            pipe.step(**example(), target=torch.randn(8))
            assert not any(map(has_live_graph, pipe.parameters()))
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "hanayo", "chimera", "zb_v"])
def test_every_bit_equals_the_plain_model(schedule: str, recompute: Any) -> None:
    model = Network(num_blocks=6)
    plain = copy.deepcopy(model)
    with pipeline(model, schedule=schedule, recompute=recompute) as pipe:
        if schedule == "chimera":
            # The second replica's sums are added when they are complete.
            given, target = example(), torch.randn(8)
            ours, theirs = pipe.step(**given, target=target), plain_step(plain, given, target)
            assert torch.equal(ours, theirs)
            return
        assert_steps_alike(pipe, plain)


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_replicas_side_by_side(gpus: FakeCuda, device: str, recompute: Any) -> None:
    """Their sums are added when both are complete."""
    model = Network(num_blocks=6)
    plain = copy.deepcopy(model)
    devices = ["cpu"] * 4 if device == "cpu" else [f"cuda:{number}" for number in range(4)]
    options: dict[str, Any] = {"devices": devices, "replicas": 2, "recompute": recompute}
    with pipeline(model, **options) as pipe:
        given, target = example(), torch.randn(8)

        def loss_of_part(number: int, _: Any) -> Tensor:
            rows = slice(ROWS * number, ROWS * (number + 1))
            return loss_of(plain(**{name: v[rows] for name, v in given.items()}), target[rows])

        for _ in range(2):
            expected = by_microbatch(plain, [ROWS] * 4, loss_of_part, num_replicas=2)
            assert torch.equal(pipe.step(**given, target=target), expected)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v"])
def test_on_gpus(gpus: FakeCuda, schedule: str, capture: bool) -> None:
    model = Network(num_blocks=6)
    plain = copy.deepcopy(model)
    devices = ["cuda:0", "cuda:1"]
    with pipeline(model, devices=devices, schedule=schedule, capture=capture) as pipe:
        assert_steps_alike(pipe, plain, num_steps=3)


def test_a_captured_step_whose_masks_lead_another_way_is_not_replayed(gpus: FakeCuda) -> None:
    model = Network()
    plain = copy.deepcopy(model)
    with pipeline(model, devices=["cuda:0", "cuda:1"], capture="auto") as pipe:
        for all_true in (False, False, True, False):
            given, target = example(), torch.randn(8)
            given["mask"] |= all_true
            given["mask"][::2, 0] = all_true
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)
                loss = pipe.step(**given, target=target)
            assert torch.equal(loss, plain_step(plain, given, target))


def test_it_has_the_names_modes_and_state_of_the_model() -> None:
    model = Network()
    with pipeline(model) as pipe:
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert [name for name, _ in pipe.named_modules()] == [n for n, _ in model.named_modules()]
        assert pipe.training
        pipe.eval()
        assert not model.training
        assert not model.norm.training
        pipe.train()
        assert model.training
        assert pipe.position is model.position
        pipe.load_state_dict(Network().state_dict())


def test_stages_begin_where_names_say() -> None:
    with pipeline(Network(), split_at=["blocks.1"]) as pipe:
        assert [list(span) for span in pipe.partition.stages] == [[0, 1, 2], [3, 4, 5, 6]]
    with pipeline(Network(), split_at={"embedding": "END"}) as pipe:
        assert list(pipe.partition.stages[0]) == [0]
    with pipeline(Network(), split_at=["blocks.1.down"]) as pipe:
        assert pipe.partition.layer_names[3:5] == ("blocks.1.up", "blocks.1.down")
        assert_steps_alike(pipe, copy.deepcopy(pipe._chain.root))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"split_at": ["blocks.9"]},
            CutError,
            "split_at must hold names of modules in the model, got 'blocks.9'; it has .*, ...",
        ),
        ({"split_at": ["norm", "blocks.1"]}, CutError, "no layers in front of blocks.1"),
        (
            {"split_at": ["blocks.0", "blocks.1"]},
            CutError,
            "split_at must name 1 place for the plan's 2 stages, got",
        ),
        ({"split_at": "norm"}, TypeError, "a list of names"),
        ({"split_at": {"norm": "MIDDLE"}}, CutError, "BEGINNING or END"),
        (
            {"split_at": ["norm"], "balance": "layers"},
            ValueError,
            "balance must be left out beside split_at, which says where stages begin, got 'layers'",
        ),
        (
            {"balance": {"blocks*": 1}},
            ValueError,
            "balance must have a price for each layer, got none for 'embedding': patterns "
            ".* do not match",
        ),
        ({"balance": {"*": -1}}, ValueError, "balance must hold prices >= 0, got .* for"),
    ],
)
def test_wrong_cuts_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pipeline(Network(), **options)


@pytest.mark.parametrize("balance", ["time", "memory", {"embedding": 0, "norm": 3, "*": 1}])
def test_stages_are_balanced_by_what_is_measured_or_said(balance: Any) -> None:
    with pipeline(Network(), balance=balance) as pipe:
        assert len(pipe.partition.costs) == 2
        assert min(pipe.partition.costs) > 0
        assert_steps_alike(pipe, copy.deepcopy(pipe._chain.root), 1)  # type: ignore[arg-type]


def test_an_error_of_the_model_tells_that_it_was_recorded() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'words'") as caught:
        pykern.Pipeline(Network(), devices="cpu:2", microbatches=2, sample={"words": X})
    assert caught.value.__notes__ == [
        "pykern: raised while the forward of Network was recorded on sample="
    ]


def test_an_option_that_nobody_takes_is_told_as_the_schedules() -> None:
    with pytest.raises(TypeError, match=r"got balanced=\. Did you mean balance=\?"):
        pipeline(Network(), balanced="time")


def test_a_model_without_a_sample_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"sample must be given to cut a .*, whose own forward is recorded, got None",
    ):
        pykern.Pipeline(Network(), devices="cpu:2", microbatches=2)


def test_what_replaces_a_parameter_is_used() -> None:
    model = Network()
    with pipeline(model) as pipe:
        model.position = nn.Parameter(torch.randn(16, 8))
        plain = copy.deepcopy(model)
        assert_steps_alike(pipe, plain)


def test_a_module_that_was_replaced_is_noticed() -> None:
    model = Network()
    with pipeline(model) as pipe:
        model.norm = nn.LayerNorm(8)
        with pytest.raises(RuntimeError, match="norm was replaced"):
            pipe(**example())


def test_other_ways_through_the_model_are_refused() -> None:
    def two_ways(self: Given, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if x.shape[0] == ROWS else self.third(y)

    with pykern.Pipeline(
        Given(two_ways), devices="cpu:2", microbatches=2, sample=torch.randn(ROWS, 4)
    ) as pipe:
        pipe(torch.randn(4, 4))
        with pytest.raises(CutError, match=r"the forward calls third \(test_recorded.py:\d+\)"):
            pipe(torch.randn(6, 4))
        pipe(torch.randn(4, 4))


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor | None = None, power: int = 1) -> Tensor:
        x = super().forward(x)
        return x if scale is None else x * scale**power


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("recompute", [None, "layer"])
def test_in_a_chain_layers_get_the_arguments_that_they_name(schedule: str, recompute: Any) -> None:
    layers = [Scaled(4, 4), nn.Linear(4, 4), Scaled(4, 4)]
    plain = copy.deepcopy(layers)
    x, scale, y = torch.randn(8, 4), torch.randn(8, 1), torch.randn(8, 4)
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
    loss_fn = nn.functional.mse_loss
    with pykern.Pipeline(
        layers, devices="cpu:2", microbatches=4, loss_fn=loss_fn, **options
    ) as pipe:
        pipe.step(x, scale=scale, power=2, target=y)
        outputs = []
        for a, b, c in zip(x.split(2), scale.split(2), y.split(2), strict=True):
            output = plain[2](plain[1](plain[0](a, b, 2)), b, 2)
            outputs.append(output.detach())
            (loss_fn(output, c) / 4).backward()
        assert torch.equal(pipe(x, scale=scale, power=2), torch.cat(outputs))
        for ours, theirs in zip(layers, plain, strict=True):
            assert ours.weight.grad is not None
            assert theirs.weight.grad is not None
            assert torch.equal(ours.weight.grad, theirs.weight.grad)
        with pytest.raises(TypeError, match=r"\(power, scale\), got shift=\. Omit shift"):
            pipe.step(x, shift=scale, target=y)


def test_a_report_tells_where_a_model_can_be_cut() -> None:
    sample = example(4)
    lines = pykern.explain_cut(Network(), sample).splitlines()
    assert lines[0].startswith("a stage can begin with  parameters  tensors")
    assert lines[1].split() == ["embedding", "80", "2", "180"]
    assert [line.split()[0] for line in lines[1:]] == [
        "embedding", "position", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm",
    ]  # fmt: skip
    model = Given(lambda self, x: self.second(x) if self.first(x).sum() > 0 else x)
    report = pykern.explain_cut(model, torch.randn(2, 4))
    assert report.startswith("The model cannot be cut: test_recorded.py:")
