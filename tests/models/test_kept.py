"""The bytes that a block keeps for its backward, per token, and the table of the guide."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from pykern.kernels.levels import LEVELS, keeping
from pykern.models.bert import MaskedAttention
from pykern.models.blocks import OnFirst
from pykern.models.gpt import MLP, Attention
from pykern.models.llama import GatedMLP, RotaryAttention
from pykern.models.moe import Experts
from tests.models.kept import kept_bytes
from tests.models.plain import plain

GUIDE = Path(__file__).parents[2] / "docs/recompute.md"
NUM_TOKENS = 16


@dataclass(frozen=True)
class Block:
    """A block of a published model's proportions.

    Attributes:
        shape: The number of the guide.
        halves: Makes its layers.
        second: Makes what passes beside x; None where x passes alone.
    """

    shape: str
    width: int
    halves: Callable[[], list[nn.Module]]
    second: Callable[[], torch.Tensor] | None = None


BLOCKS = {
    "Llama": Block(
        "h = 4096, f = 3.5 h, 32 heads, 8 of k and v (Llama 3 8B)",
        4096,
        lambda: [RotaryAttention(4096, 32, 8, 10000.0), GatedMLP(4096, 14336)],
    ),
    "GPT": Block(
        "h = 1024, f = 4 h, 16 heads (GPT-2 medium)",
        1024,
        lambda: [Attention(1024, 16, 0.0), MLP(1024, 0.0)],
    ),
    "BERT": Block(
        "h = 1024, f = 4 h, 16 heads, padding (BERT large)",
        1024,
        lambda: [MaskedAttention(Attention(1024, 16, 0.0)), OnFirst(MLP(1024, 0.0))],
        lambda: torch.ones(1, NUM_TOKENS, dtype=torch.bool),
    ),
    "MoE": Block(
        "h = 512, f = 3.5 h, 4 heads, 1 of k and v, 2 of 8 experts (an eighth of Mixtral 8x7B)",
        512,
        lambda: [OnFirst(RotaryAttention(512, 4, 1, 10000.0)), Experts(512, 1792, 8, 2)],
        lambda: torch.zeros(()),
    ),
}


def bytes_per_token(block: Block) -> dict[str, float]:
    """For the twin in plain torch and by level, in bfloat16."""
    with torch.device("meta"):
        layers = nn.Sequential(*block.halves()).to(torch.bfloat16)
    # The weights do not matter; drawing them would take most of the test's time.
    layers.to_empty(device="cpu")
    x = torch.randn(1, NUM_TOKENS, block.width).bfloat16().requires_grad_()
    inputs = x if block.second is None else (x, block.second())
    kept = {"plain torch": count(plain(layers), inputs)}
    for level in LEVELS:
        with keeping(level):
            kept[level] = count(layers, inputs)
    return kept


def count(layers: nn.Sequential, inputs: object) -> float:
    return kept_bytes(lambda: layers(inputs), without=layers) / NUM_TOKENS


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, float]]:
    return {name: bytes_per_token(block) for name, block in BLOCKS.items()}


def test_llama_keeps_less_than_half_of_plain_torch(kept):
    """Beside multiples of h are, in float32, numbers of 2 norms, and of 32 heads' attention."""
    h, beside = 4096, 2 * 4 + 32 * 4
    assert kept["Llama"]["plain torch"] == pytest.approx(49 * h, rel=0.01)
    assert kept["Llama"]["none"] == 34 * h + beside
    assert kept["Llama"]["ops"] == 23 * h + beside
    gate_up_in_8_bits = 2 * 3.5 * h * (1 + 4 / 128)
    assert kept["Llama"]["ops+stash"] == 9 * h + gate_up_in_8_bits + beside
    assert kept["Llama"]["ops+stash"] < 16.3 * h


def test_gpt_and_bert_keep_their_input_twice_and_what_attention_and_gelu_need(kept):
    """A norm has two numbers here. Attention keeps a bfloat16 per token of the mask."""
    h, beside = 1024, 2 * 8 + 16 * 4
    assert kept["GPT"]["ops"] == (2 * 2 + 6 + 2 + 2 * 4) * h + beside
    assert kept["GPT"]["ops+stash"] == (2 * 2 + 6 + 2 + 4 * (1 + 4 / 128)) * h + beside
    assert kept["GPT"]["ops"] < 0.63 * kept["GPT"]["plain torch"]
    for name in ("ops", "ops+stash"):
        assert kept["BERT"][name] == kept["GPT"][name] + 2


def test_a_mixture_keeps_no_copies_of_rows(kept):
    """Besides a Llama's attention its norm's output, and gate and up of two experts."""
    h = 512
    assert (2 * 2 + 3 + 2 + 2 + 2 * 4 * 3.5) * h < kept["MoE"]["ops"] < 39.3 * h
    stash = (2 * 2 + 3 + 2 + 2 + 2 * 2 * 3.5 * (1 + 4 / 128)) * h
    assert stash < kept["MoE"]["ops+stash"] < stash + 0.3 * h


def table(kept: dict[str, dict[str, float]]) -> str:
    names = ["plain torch", *LEVELS]
    lines = [
        "| block | " + " | ".join(names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for model, counts in kept.items():
        width = BLOCKS[model].width
        cells = [f"{counts[name] / width:.2f} h" for name in names]
        lines.append(f"| {model}: {BLOCKS[model].shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_guide_has_the_table(kept):
    assert table(kept) in GUIDE.read_text()
