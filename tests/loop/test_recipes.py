"""The loops of docs/training-loops.md work, and train as the same loops around the plain model."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.loop.loops import WIDTH, mlp, plain_loop_step

PAGE = (Path(__file__).parents[2] / "docs/training-loops.md").read_text()


def code(name: str = "") -> str:
    """The page's blocks of Python of this name, one after another."""
    header = re.escape(f"```python {name}".strip())
    return "\n".join(re.findall(rf"^{header}\n(.*?)^```", PAGE, re.M | re.S))


def run(name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(code(name), namespace)
    return namespace


def assert_equal_parameters(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name


def test_the_parts_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    run("")
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    assert capsys.readouterr().out == shown


def test_a_plain_loop() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(5)]
    losses = run("plain")["train"](model, batches)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    scaler = torch.amp.GradScaler("cpu")
    for loss, (x, y) in zip(losses, batches, strict=True):
        with torch.autocast("cpu", torch.float16):
            expected = plain_loop_step(plain, x, y, num_microbatches=4, scaler=scaler)
        assert torch.equal(loss, expected)
        scaler.unscale_(optimizer)
        pykern.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        warm_up.step()
        optimizer.zero_grad()
    assert_equal_parameters(model, plain)


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    import lightning  # noqa: PLC0415 - takes seconds
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    data = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))
    module_type = run("lightning")["Module"]

    def trainer(epochs: int, folder: str) -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            default_root_dir=tmp_path / folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    model = mlp()
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    first = trainer(4, "first")
    first.fit(module_type(model), DataLoader(data, 8), DataLoader(data, 8))
    val_loss = first.callback_metrics["val_loss"]

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    for _ in range(4):
        for x, y in DataLoader(data, 8):
            plain_loop_step(plain, x, y, num_microbatches=4)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        losses = [F.mse_loss(plain(x), y) for x, y in DataLoader(data, 8)]
    torch.testing.assert_close(val_loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)

    # From the checkpoint of another run, two epochs in, to the same end.
    half = trainer(2, "half")
    half.fit(module_type(again), DataLoader(data, 8))
    half.save_checkpoint(tmp_path / "half.ckpt")
    other = mlp()
    trainer(4, "rest").fit(
        module_type(other), DataLoader(data, 8), ckpt_path=str(tmp_path / "half.ckpt")
    )
    assert_equal_parameters(other, model)


def tiny_gpt() -> Any:
    import transformers  # noqa: PLC0415 - takes seconds

    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=16,
        n_head=2,
        n_positions=16,
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return transformers.GPT2LMHeadModel(config)


def arguments(folder: Path, **options: Any) -> Any:
    import transformers  # noqa: PLC0415 - takes seconds

    usual = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 6,
        "save_steps": 3,
        "logging_strategy": "no",
        "per_device_train_batch_size": 4,
        "warmup_steps": 2,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**(usual | options))


def plain_trainer_type() -> Any:
    import transformers  # noqa: PLC0415 - takes seconds

    class PlainTrainer(transformers.Trainer):
        """The same microbatches, one after another."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            total = torch.zeros(())
            for start in (0, 2):
                part = {name: each[start : start + 2] for name, each in inputs.items()}
                loss = model(**part, num_items_in_batch=num_items_in_batch).loss
                loss.backward()
                total += loss.detach()
            return total

    return PlainTrainer


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    model, other = tiny_gpt(), tiny_gpt()
    plain = copy.deepcopy(model)
    rows = [torch.randint(64, (8,)) for _ in range(16)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    zeros = torch.zeros(2, 8, dtype=torch.int64)
    pipeline = {
        "devices": "cpu:2",
        "microbatches": 2,
        "sample": {"input_ids": zeros, "labels": zeros},
    }
    trainer_type = run("transformers")["PipelineTrainer"]
    ours = trainer_type(
        model,
        arguments(tmp_path / "a"),
        train_dataset=data,
        eval_dataset=data[:6],
        pipeline=pipeline,
    )
    theirs = plain_trainer_type()(
        plain, arguments(tmp_path / "b"), train_dataset=data, eval_dataset=data[:6]
    )
    assert ours.train().training_loss == theirs.train().training_loss
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-6, atol=1e-7)
    expected = theirs.evaluate()["eval_loss"]
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)

    resumed = trainer_type(other, arguments(tmp_path / "c"), train_dataset=data, pipeline=pipeline)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-3"))
    assert_equal_parameters(other, model)
