"""TP x PP: process i runs the i-th shard of every stage, on its own GPUs of the box.

torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import pykern
from pykern import checkpoint

STAGES = 2


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


kind = "cuda" if torch.cuda.is_available() else "cpu"
devices = f"cpu:{STAGES}"
if kind == "cuda":
    first = int(os.environ["LOCAL_RANK"]) * STAGES
    devices = [f"cuda:{first + i}" for i in range(STAGES)]
    torch.cuda.set_device(first)  # before the mesh, which else takes GPU number LOCAL_RANK
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))

torch.manual_seed(0)  # alike in all processes, and so are the parameters
model = nn.Sequential(nn.Linear(16, 64), *[block() for _ in range(6)], nn.Linear(64, 1))
# In every block, which has numbers for names, the first linear layer by columns, the other by rows.
styles = {"*.1": ColwiseParallel(), "*.3": RowwiseParallel()}
pipe = pykern.Pipeline(
    model,
    devices=devices,
    schedule="one_f_one_b",
    microbatches=4,
    loss_fn=F.mse_loss,
    tensor_parallel=(mesh["tp"], styles),
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)  # behind the pipeline: they are new
for step in range(10):
    x, y = batch(step)  # the same in all processes
    optimizer.zero_grad()
    loss = pipe.step(x, target=y)
    pykern.clip_grad_norm_(pipe.parameters(), 1.0)  # the norm of the whole
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if path := os.environ.get("CHECKPOINT"):
    checkpoint.save(path, pipe, optimizer)  # called by all, written by the first
pipe.close()
dist.destroy_process_group()
