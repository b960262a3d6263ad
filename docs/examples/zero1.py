"""DP x PP with ZeRO-1: every process keeps its part of the optimizer's state, one file has it all.

torchrun --nproc-per-node 2 docs/examples/zero1.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pykern
from pykern import checkpoint

STAGES = 4
FILE = Path(tempfile.gettempdir()) / "zero1.pykern"


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
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))

torch.manual_seed(0)  # alike in all processes, and so are the parameters
model = nn.Sequential(nn.Linear(16, 64), *[block() for _ in range(6)], nn.Linear(64, 1))
pipe = pykern.Pipeline(
    model,
    devices=devices,
    schedule="one_f_one_b",
    microbatches=4,
    loss_fn=F.mse_loss,
    process_group=mesh["dp"],
)
optimizer = pykern.ZeroOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
for step in range(10):
    x, y = (t.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for t in batch(step))
    optimizer.zero_grad()
    loss = pipe.step(x, target=y)  # of the rows of all processes
    optimizer.clip_grad_norm_(1.0)  # by the norm of all gradients, wherever they are
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
held = sum(t.nbytes for entries in optimizer.state.values() for t in entries.values())
if dist.get_rank() == 0:
    print(f"the first process keeps {held:,} bytes of state")
checkpoint.save(FILE, pipe, optimizer, extra={"step": 10})  # by all; the first writes
dist.barrier()
# Another number of processes may go on with it, or one with plain AdamW.
checkpoint.load(FILE, pipe, optimizer)
pipe.close()
dist.destroy_process_group()
