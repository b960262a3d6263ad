"""nanoGPT as a pipeline: train, evaluate, save, resume on another number of stages, sample.

    python docs/examples/nanogpt.py
    python docs/examples/nanogpt.py --resume nanogpt-out/step-100.ckpt --devices cpu:3

On GPUs, with your own text:

    python docs/examples/nanogpt.py --devices cuda --text input.txt --autocast bfloat16 \
        --layers 24 --width 1024 --heads 16 --context 1024 --batch 64 --microbatches 16

Expected output (last digits differ between machines):

    step 100: loss 3.073, held-out loss 2.693
    step 200: loss 2.991, held-out loss 2.573
    sample: b'The  f    rpl? f? tm dtcarrnuten   aanhbeica'
    without pykern: held-out loss 2.573
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import pykern
from pykern.models import next_token_loss


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def windows(text: bytes, context: int, count: int) -> TensorDataset:
    """Random pieces of the text, always in the same order, and the bytes that follow theirs."""
    order = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - context, (count, 1), generator=order)
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[starts + torch.arange(context + 1)]
    return TensorDataset(rows[:, :-1].long(), rows[:, 1:].long())


@torch.no_grad()
def evaluate(model: nn.Module, data: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    losses = [next_token_loss(model(ids).cpu(), following) for ids, following in data]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def continued(pipe: pykern.Pipeline, text: bytes, length: int, context: int) -> bytes:
    pipe.eval()
    for _ in range(length):
        seen = list(text[-context:])
        ids = torch.tensor([seen + [0] * (context - len(seen))])  # of one shape: recorded once
        chances = F.softmax(pipe(ids)[0, len(seen) - 1].cpu() / 0.7, dim=-1)
        text += bytes(torch.multinomial(chances, 1).tolist())
    return text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"layers": 4, "width": 64, "heads": 4, "context": 32, "batch": 32, "microbatches": 4}
    defaults |= {"steps": 200, "save-every": 100, "sample": 40, "rate": 1e-2}
    for name, value in (defaults | {"devices": "cpu:2", "schedule": "one_f_one_b"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--autocast", choices=["off", "bfloat16"], default="off")
    parser.add_argument("--text", type=Path, help="by default, a manual of Python")
    parser.add_argument("--resume", type=Path, help="a checkpoint; give the other arguments again")
    parser.add_argument("--out", type=Path, default=Path("nanogpt-out"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    asked.out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    text = asked.text.read_bytes() if asked.text else "\n".join(topics.values()).encode()
    held_out = DataLoader(windows(text[-len(text) // 10 :], asked.context, 64), asked.batch)

    model = GPT(asked.layers, asked.width, asked.heads, asked.context)
    pipe = pykern.Pipeline(
        model,
        devices=asked.devices,
        schedule=asked.schedule,
        microbatches=asked.microbatches,
        loss_fn=next_token_loss,
        sample=torch.zeros(asked.batch // asked.microbatches, asked.context, dtype=torch.long),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=asked.rate, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, asked.rate, asked.steps, pct_start=0.1)
    done = 0
    if asked.resume:
        done = pykern.checkpoint.load(asked.resume, pipe, optimizer, scheduler=rates)["step"]
    data = windows(text[: -len(text) // 10], asked.context, asked.steps * asked.batch)
    rest = Subset(data, range(done * asked.batch, len(data)))
    autocast = torch.autocast(asked.devices.split(":")[0], torch.bfloat16, asked.autocast != "off")
    for step, (ids, following) in enumerate(DataLoader(rest, asked.batch), done + 1):
        with autocast:
            loss = pipe.step(ids, target=following)
        pykern.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if step % asked.save_every == 0:
            print(f"step {step}: loss {loss:.3f}, held-out loss {evaluate(pipe, held_out):.3f}")
            file = asked.out / f"step-{step}.ckpt"
            pykern.checkpoint.save(file, pipe, optimizer, scheduler=rates, extra={"step": step})
    print("sample:", continued(pipe, b"The ", asked.sample, asked.context))
    pipe.close()

    torch.save(model.cpu().state_dict(), asked.out / "model.pt")
    alone = GPT(asked.layers, asked.width, asked.heads, asked.context)
    alone.load_state_dict(torch.load(asked.out / "model.pt"))
    print(f"without pykern: held-out loss {evaluate(alone, held_out):.3f}")


if __name__ == "__main__":
    main()
