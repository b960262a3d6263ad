"""Replicas in one process: two pipelines, each on half of the devices and of the microbatches.

python docs/examples/replicas.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

DEVICES = 4


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), *[block() for _ in range(6)], nn.Linear(64, 1))
devices = [f"cuda:{i}" for i in range(DEVICES)] if torch.cuda.is_available() else f"cpu:{DEVICES}"
pipe = pykern.Pipeline(
    model,
    devices=devices,
    replicas=2,
    schedule="one_f_one_b",
    microbatches=8,
    loss_fn=F.mse_loss,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
for step in range(10):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = pipe.step(x, target=y)
    pykern.clip_grad_norm_(pipe.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
pipe.close()
