"""Two of the examples, unchanged: losses of CPU workers bit by bit, bytes of the estimate."""

import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pykern
from pykern.models import next_token_loss
from pykern.sizes import Estimate
from tests.rehearse.scripts import ROOT, Ended, plain_losses, rehearse

EXAMPLES = ROOT / "docs/examples"
NANOGPT = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "8", "--batch", "8"]
LLAMA = ["--layers", "2", "--width", "16", "--heads", "2", "--rows", "64", "--batch", "8"]


def assert_bytes(seen: Ended, expected: Estimate) -> None:
    (pipeline,) = seen.seen["pipelines"]
    told = [{**device, "gpu": None} for device in pipeline["devices"]]
    assert told == [{"gpu": None, **asdict(device)} for device in expected.devices]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_nanogpt(tmp_path: Path, autocast: str) -> None:
    script = EXAMPLES / "nanogpt.py"
    sizes = [*NANOGPT, "--autocast", autocast, "--save-every", "2"]
    seen = rehearse(script, tmp_path, *sizes, "--devices", "cuda")
    assert seen.status == 0, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert pipeline["losses"] == plain_losses(script, tmp_path, *sizes, "--devices", "cpu:2")
    assert pipeline["fits"] is True
    assert pipeline["violations"] == []
    assert pipeline["prediction"]["tokens_per_s"] == 8 * pipeline["prediction"]["rows_per_s"]
    if autocast == "off":
        model = runpy.run_path(str(script))["GPT"](layers=2, width=16, heads=2, context=8)
        rows = torch.zeros(2, 8, dtype=torch.long)
        assert_bytes(
            seen,
            pykern.estimate(
                model,
                devices=2,
                microbatches=4,
                sample=rows,
                target=rows,
                loss_fn=next_token_loss,
                optimizer=torch.optim.AdamW,
            ),
        )


@pytest.mark.timeout(300)
def test_trainer(tmp_path: Path) -> None:
    script = EXAMPLES / "fine_tune.py"
    seen = rehearse(script, tmp_path, *LLAMA, "--devices", "cuda")
    assert seen.status == 0, seen.err
    (pipeline,) = seen.seen["pipelines"]
    assert pipeline["losses"] == plain_losses(script, tmp_path, *LLAMA, "--devices", "cpu:2")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    ids = torch.zeros(2, 12, dtype=torch.long)
    sample: dict[str, Any] = {"input_ids": ids, "labels": ids}
    expected = pykern.estimate(
        LlamaForCausalLM(config),
        devices=2,
        microbatches=4,
        sample=sample | {"num_items_in_batch": torch.tensor(1)},
        loss_fn=lambda output: output.loss,
        optimizer=torch.optim.AdamW,
    )
    assert_bytes(seen, expected)
