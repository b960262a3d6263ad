"""A plan on torch's own runtime: a process for each device of one pipeline, over several boxes.

On each of two boxes with four GPUs, eight devices in all, where box-0 is the name of the first:

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint box-0:29500 \
    docs/examples/plan_on_torch.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pykern.schedules import hanayo


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
plan = hanayo(dist.get_world_size(), 8)  # or a searched one, or your own
mine = [i for i, owner in enumerate(plan.placement.replicas[0]) if owner == dist.get_rank()]

torch.manual_seed(0)  # alike in all processes, each of which keeps its own stages
model = [block() for _ in range(plan.num_stages)]
model[0] = nn.Sequential(nn.Linear(16, 64), model[0])
model[-1] = nn.Sequential(model[-1], nn.Linear(64, 1))
modules = nn.ModuleDict({str(i): model[i] for i in mine}).to(device)
stages = [PipelineStage(modules[str(i)], i, plan.num_stages, device) for i in mine]
schedule = plan.to_torch(stages, loss_fn=F.mse_loss)
optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)
for step in range(10):
    x, y = (part.to(device) for part in batch(step))
    is_last = plan.num_stages - 1 in mine
    losses: list[Tensor] = []
    optimizer.zero_grad()
    schedule.step(
        *([x] if 0 in mine else []),
        target=y if is_last else None,
        losses=losses if is_last else None,
    )
    optimizer.step()
    if is_last:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
dist.destroy_process_group()
