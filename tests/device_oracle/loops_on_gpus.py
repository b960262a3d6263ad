"""Loops of other libraries on GPUs, with torch's own engine. Run by test_device_oracle.py."""

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from typer.testing import CliRunner

from bench.shared_library import ROOT
from pykern.cli import app
from tests.device_oracle.oracle import gpus

SCRIPTS = {
    "fine_tune": "--layers 2 --width 16 --rows 16 --batch 8 --microbatches 4 --steps 2",
    "lora": "--layers 2 --width 16 --batch 4 --microbatches 2 --steps 2",
    "nanogpt": "--layers 2 --width 16 --context 16 --batch 4 --microbatches 2 --steps 2 --sample 2",
    "vision": "--blocks 2 --width 4 --batch 16 --microbatches 2 --images 32 --epochs 1",
    "gan": "--width 8 --batch 8 --steps 2",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Lightning asks for workers that load data, and tells of what it is about to change.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with gpus(2):
        yield


def loop(name: str) -> dict[str, Any]:
    """The names in a block of the guide, with GPUs in the place of CPU workers."""
    page = (ROOT / "docs/training-loops.md").read_text()
    block = re.search(rf"^```python {name}\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1].replace('"cpu:2"', '"cuda"'), names)
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name: str) -> None:
    main = runpy.run_path(str(ROOT / f"docs/examples/{name}.py"))["main"]
    main([*SCRIPTS[name].split(), "--devices", "cuda"])


def test_every_schedule_is_verified(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(
        "import torch\n"
        "from torch.nn.functional import mse_loss\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(8)]\n"
        "    x = torch.randn(16, 8)\n"
        "    return torch.nn.Sequential(*layers), x, x, mse_loss\n"
    )
    arguments = ("verify", "mlp:make", "--devices", "cuda", "--microbatches", "4")
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    verdicts = re.findall(r"^(\w+) +\d+ +(\w+)", result.output, re.M)
    assert len(verdicts) == 16
    assert {verdict for _, verdict in verdicts} == {"equal"}


def test_accelerate_leaves_layers_where_they_are() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    data = DataLoader(TensorDataset(*torch.randn(2, 8, 8)), batch_size=4)
    accelerator = importlib.import_module("accelerate").Accelerator()
    losses = loop("accelerate")["train"](accelerator, layers, data)
    assert [loss.device.index for loss in losses] == [1, 1]
    assert [layer.weight.device.index for layer in layers] == [0, 0, 1, 1]


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["lightning", "lightning outside"])
def test_lightning_leaves_layers_where_they_are(name: str, accelerator: str) -> None:
    lightning = importlib.import_module("lightning")
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    module = loop(name)["Module"](layers)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, **dict.fromkeys(quiet, False)
    )
    data = DataLoader(TensorDataset(*torch.randn(2, 8, 8)), batch_size=4)
    trainer.fit(module, data, *([] if "outside" in name else [data]))
    assert [layer.weight.device.index for layer in layers] == [0, 0, 1, 1]
    module.model.close()


@pytest.mark.parametrize("name", ["transformers", "transformers outside"])
def test_the_trainer_leaves_layers_where_they_are(name: str, tmp_path: Path) -> None:
    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**config, use_cache=False))
    ids = torch.randint(64, (8, 6))
    data = [{"input_ids": row, "labels": row} for row in ids]
    count = {} if "outside" in name else {"num_items_in_batch": 1}
    options = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    options._n_gpu = 1
    trainer = loop(name)["PipelineTrainer"](
        model,
        options,
        train_dataset=data,
        eval_dataset=data,
        pipeline={
            "devices": "cuda",
            "microbatches": 2,
            "sample": {"input_ids": ids[:2], "labels": ids[:2], **count},
        },
    )
    trainer.train()
    assert 4 < trainer.evaluate()["eval_loss"] < 4.5
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    trainer.pipeline.close()
