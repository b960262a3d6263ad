"""Claim: adapters on a frozen base take a pipeline less than the full fine-tune, and no W.

Steps of a Llama of transformers, forward and backward, with peft's LoRA on all blocks or on the
last half of them. The full fine-tune is the baseline; a plain loop runs the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_NUM_MICROBATCHES = 8
_SETTLE_S = 0.02

Report = Callable[[list[Record]], None]


def _llama(*, smoke: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    width = 16 if smoke else 256
    config = transformers.LlamaConfig(
        vocab_size=64 if smoke else 1024,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _adapted(base: nn.Module, layers: range) -> nn.Module:
    """With LoRA on some blocks, nothing of which is zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=8,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(layers),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model: nn.Module = peft.get_peft_model(copy.deepcopy(base), config)
    return model


def _plain(name: str, model: nn.Module, batch: Tensor) -> Contender:
    def step() -> Tensor:
        total = torch.zeros(())
        for part in batch.chunk(_NUM_MICROBATCHES):
            loss = model(input_ids=part, labels=part).loss / _NUM_MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return in_this_process(name, model, 1, step)


def _piped(name: str, model: nn.Module, plan: Plan, batch: Tensor) -> Contender:
    part = batch.chunk(_NUM_MICROBATCHES)[0]
    pipe = pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule=plan,
        loss_fn=lambda output: output.loss,
        sample={"input_ids": part, "labels": part},
    )
    return in_this_process(name, pipe, 1, lambda: pipe.step(input_ids=batch, labels=batch))


def _groups(base: nn.Module, batch: Tensor) -> list[list[Contender]]:
    """Contenders by what they train, the plain loop first."""
    plan = schedules.interleaved(2, _NUM_MICROBATCHES)
    # Two blocks in each of four stages.
    forwards_alone = plan.with_frozen([0, 1])
    groups = []
    for name, layers, plans in (
        ("full", None, {"": plan}),
        ("LoRA", range(8), {"": plan}),
        ("LoRA on the last half", range(4, 8), {"": plan, ", frozen in the plan": forwards_alone}),
    ):
        model = base if layers is None else _adapted(base, layers)
        group = [_plain(f"{name}, plain loop", model, batch)]
        for more, followed in plans.items():
            group.append(_piped(f"{name}{more}", copy.deepcopy(model), followed, batch))
        groups.append(group)
    return groups


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora(benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """Two workers with two stages each."""
    torch.manual_seed(0)
    base = _llama(smoke=smoke)
    batch = torch.randint(64, (_NUM_MICROBATCHES * 2, 8 if smoke else 128))
    groups = _groups(base, batch)
    for group in groups:
        assert_same_answer(group)
    contenders = [contender for group in groups for contender in group]
    samples = interleave(benchmark, contenders, 1 if smoke else 15, settle_s=_SETTLE_S)
    if not smoke:
        case = f"Llama of 8 blocks, {_NUM_MICROBATCHES} microbatches of 2 x 128 tokens"
        report(judge("adapters", case, samples, "full", partial(_figures, batch.numel())))


def _figures(num_tokens: int, median_ms: float, baseline_ms: float) -> dict[str, float]:
    return {"tokens/s": num_tokens / median_ms * 1e3, "speed-up": baseline_ms / median_ms}
