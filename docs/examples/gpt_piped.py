"""gpt_plain.py as a pipeline, which saves and resumes. docs/first-tasks.md goes through it.

python docs/examples/gpt_piped.py --schedule zb_h1 --run run.ckpt
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    order = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - CONTEXT, (32, 1), generator=order)
    rows = TEXT[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """The model and a batch, as `pykern tune` and `pykern profile` take them."""
    return GPT(), *batch(0), loss_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--schedule", default="one_f_one_b")
    parser.add_argument("--run", type=Path, help="resumed if the file exists; saved at the end")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # torch's own threads would compete with the workers
    pipe = pykern.Pipeline(
        GPT(),
        devices=asked.devices,
        schedule=asked.schedule,
        microbatches=8,
        loss_fn=loss_of,
        sample=batch(0)[0][:4],  # as large as a microbatch
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    done = 0
    if asked.run and asked.run.exists():
        done = pykern.checkpoint.load(asked.run, pipe, optimizer)["step"]
    for step in range(done, asked.steps):
        ids, following = batch(step)
        optimizer.zero_grad()
        loss = pipe.step(ids, target=following)
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.5f}")
    if asked.run:
        pykern.checkpoint.save(asked.run, pipe, optimizer, extra={"step": asked.steps})
    pipe.close()


if __name__ == "__main__":
    main()
