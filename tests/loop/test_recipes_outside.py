"""Loops of Lightning, Accelerate and Hugging Face around `pipe(x)`, with losses of their own."""

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loop.loops import WIDTH, mlp

from .test_recipes import arguments, assert_equal_parameters, plain_trainer_type, run, tiny_gpt

# Trainers warn of what they find on this machine.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class ByMicrobatch(nn.Module):
    """The plain model, called for one microbatch after another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        # Autograd begins with what has run last, and pykern adds up from the first.
        for part in reversed(x.chunk(4)):
            # Or the sums of the microbatches would be of what autocast has rounded.
            torch.clear_autocast_cache()
            outputs.append(self.model(part))
        return torch.cat(outputs[::-1])


def data() -> Any:
    from torch.utils.data import TensorDataset  # noqa: PLC0415 - takes seconds

    return TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))


OPTIONS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    {"precision": "bf16-mixed"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_lightning_optimizes_by_itself(tmp_path: Path, options: dict[str, Any]) -> None:
    import lightning  # noqa: PLC0415 - takes seconds
    from torch.utils.data import DataLoader  # noqa: PLC0415

    model = mlp()
    plain = copy.deepcopy(model)
    ours, theirs = (run("lightning outside")["Module"](each) for each in (model, plain))
    theirs.model.close()
    theirs.model = ByMicrobatch(plain)
    rows = data()
    found = []
    for module in (ours, theirs):
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **options,
        )
        trainer.fit(module, DataLoader(rows, 8))
        found.append(trainer.callback_metrics["loss"])
    assert torch.equal(*found)
    assert_equal_parameters(model, plain)


@pytest.fixture
def _no_accelerator() -> Iterator[None]:
    """The library has one state for a process."""
    state = importlib.import_module("accelerate.state").AcceleratorState

    state._reset_state(True)
    yield
    state._reset_state(True)


@pytest.mark.usefixtures("_no_accelerator")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tmp_path: Path, precision: str) -> None:
    from torch.utils.data import DataLoader  # noqa: PLC0415

    model = mlp()
    plain = ByMicrobatch(copy.deepcopy(model))
    rows = data()
    namespace = run("accelerate")

    accelerate = importlib.import_module("accelerate")

    def accelerator() -> Any:
        return accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )

    ours = accelerator()
    losses = namespace["train"](ours, model, DataLoader(rows, 8))
    namespace["pykern"] = type("Plain", (), {"Pipeline": lambda each, **_: each})
    wanted = namespace["train"](accelerator(), plain, DataLoader(rows, 8))
    assert list(map(torch.equal, losses, wanted)) == [True, True]
    assert_equal_parameters(model, plain.model)
    # The library saves and loads the pipeline's state under the model's names.
    ours.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ours.load_state(tmp_path)
    assert_equal_parameters(model, plain.model)


def rows_with_few_labels() -> list[dict[str, Tensor]]:
    """Rows in which different numbers of labels count."""
    rows = [torch.randint(64, (8,)) for _ in range(48)]
    labels = [row.clone() for row in rows]
    for number, row in enumerate(labels):
        row[: number % 6] = -100
    pairs = zip(rows, labels, strict=True)
    return [{"input_ids": row, "labels": wanted} for row, wanted in pairs]


def batch_by_batch(trainer_type: Any) -> Any:
    """As `pipe(x)`, which adds the sum of a batch's microbatches to what there is."""

    class Complete(trainer_type):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            parameters = list(model.parameters())
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            for parameter, there in zip(parameters, before, strict=True):
                if there is not None:
                    parameter.grad += there
            return loss

    return Complete


@pytest.mark.parametrize("recipe", ["transformers", "transformers outside"])
def test_every_label_of_accumulated_batches_counts_the_same(tmp_path: Path, recipe: str) -> None:
    import transformers  # noqa: PLC0415 - takes seconds

    model = tiny_gpt()
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)
    rows = rows_with_few_labels()
    zeros = torch.zeros(2, 8, dtype=torch.int64)
    pipeline = {
        "devices": "cpu:2",
        "microbatches": 2,
        "sample": {"input_ids": zeros, "labels": zeros},
    }
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "max_steps": 3}

    def trained(kind: Any, each: nn.Module, **extra: Any) -> Any:
        given = arguments(tmp_path, **options)
        trainer = kind(each, given, train_dataset=rows, eval_dataset=rows[:6], **extra)
        return trainer, trainer.train().training_loss

    plain_type = plain_trainer_type()
    if recipe == "transformers outside":
        plain_type = batch_by_batch(plain_type)
    ours, loss = trained(run(recipe)["PipelineTrainer"], model, pipeline=pipeline)
    _, wanted = trained(plain_type, plain)
    assert loss == wanted
    assert_equal_parameters(model, plain)
    # And as the Trainer alone, which calls the model for a batch at once.
    theirs, loss_of_whole = trained(transformers.Trainer, whole)
    assert loss == pytest.approx(loss_of_whole, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-4, atol=1e-6)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
    ours.pipeline.close()


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    model = tiny_gpt()
    plain = copy.deepcopy(model)
    rows = rows_with_few_labels()

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    zeros = torch.zeros(2, 8, dtype=torch.int64)
    pipeline = {"devices": "cpu:2", "microbatches": 2, "sample": {"input_ids": zeros}}
    kind = run("transformers outside")["PipelineTrainer"]
    options: dict[str, Any] = {"train_dataset": rows, "compute_loss_func": loss_of}
    given = arguments(tmp_path, max_steps=3, label_smoothing_factor=0.0)
    ours = kind(model, given, pipeline=pipeline, **options)
    theirs = kind.__mro__[1](plain, given, **options)
    assert ours.train().training_loss == pytest.approx(theirs.train().training_loss, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-4, atol=1e-6)
    ours.pipeline.close()
