"""Slices of models with a forward of their own, which is recorded."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel

import pykern
from pykern.tensors.dtensor import whole
from pykern.trace import CutError
from tests import peers
from tests.diagonal import nightly
from tests.parallel.sharded import assert_near, mesh_of

pytestmark = pytest.mark.slow

# Gradients of one step are below one, and off by the roundings of sums of at most 96 products
# of numbers below 4, in each of 3 blocks 4 times; what follows has derivatives below 4.
NEAR = 4 * 3 * 4 * 96 * 4 * 2**-53


class Attention(nn.Module):
    """Attention over the heads of the process's shards, of 4 values each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part(x).view(rows, length, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.project(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    """[rows, seq] of 12 words -> [rows, seq, 12], with a mask that all blocks use."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 12)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


WORDS = {
    "blocks.*.attention.[qkv]": ColwiseParallel(),
    "blocks.*.attention.project": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def model() -> Words:
    torch.manual_seed(1)
    return Words().double()


def some_words(rows: int = 8, length: int = 6) -> Tensor:
    return torch.randint(12, (rows, length), generator=torch.Generator().manual_seed(2))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sharded_step(_: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of a step, and the output for inputs of another shape."""
    given: dict[str, Any] = {
        "devices": "cpu:2",
        "microbatches": 4,
        "loss_fn": loss_of,
        "sample": some_words(2),
    }
    parallel = (mesh_of(2), WORDS)
    with pykern.Pipeline(model(), tensor_parallel=parallel, **given, **options) as pipe:
        ids = some_words()
        pipe.step(ids, target=ids)
        named = pipe.named_parameters()
        return {name: whole(p.grad) for name, p in named}, pipe(some_words(5, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        # Cut within blocks, and within what is sharded.
        {"schedule": "zb_v"},
        {"split_at": ["blocks.1.attention.project"], "recompute": "layer"},
    ],
)
def test_gradients_are_the_plain_models(options: dict[str, Any]) -> None:
    plain = model()
    loss_of(plain(some_words()), some_words()).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for found, output in peers.run(2, sharded_step, options):
        assert_near(found, gradients, NEAR)  # type: ignore[arg-type]
        assert (output - plain(some_words(5, 4))).abs().max() <= NEAR


LLAMA = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).double()


def llama_step(_: int, schedule: str) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = some_words(8, 16)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    sample = {**batch, "input_ids": tokens[:2], "labels": tokens[:2]}
    with pykern.Pipeline(
        llama(),
        devices="cpu:2",
        schedule=schedule,
        microbatches=4,
        loss_fn=lambda output: output.loss,
        sample=sample,
        tensor_parallel=(mesh_of(2), LLAMA),
    ) as pipe:
        loss = pipe.step(**batch)
        return loss, {name: whole(p.grad) for name, p in pipe.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["hanayo", nightly("one_f_one_b")])
def test_a_llama_of_hugging_face(schedule: str) -> None:
    plain = copy.deepcopy(llama())
    tokens = some_words(8, 16)
    wanted = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
    wanted.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for loss, found in peers.run(2, llama_step, schedule):
        # transformers computes losses in float32; their mean is rounded once more for each.
        assert loss.dtype is wanted.dtype is torch.float32
        assert abs(loss - wanted) <= 4 * torch.finfo(loss.dtype).eps * wanted
        assert_near(found, gradients, NEAR)


def cut_within(_: int) -> str:
    there = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    styles = {"blocks.*": there, **WORDS}
    try:
        pykern.Pipeline(
            model(),
            devices="cpu:2",
            microbatches=4,
            sample=some_words(2),
            split_at=["blocks.1.down"],
            tensor_parallel=(mesh_of(2), styles),
        )
    except (CutError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_is_cut_has_no_style() -> None:
    for message in peers.run(2, cut_within):
        assert "got one for blocks.1, within which the model is cut" in message
