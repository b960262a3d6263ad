"""DP x TP x PP with ZeRO-1: pipelines that share the batch, each in shards, from one mesh.

torchrun --nproc-per-node 4 docs/examples/data_tensor_pipeline.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import pykern

SLICES, STAGES = 2, 2


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
shape = (dist.get_world_size() // SLICES, SLICES)
mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # alike in all processes, and so are the parameters
model = nn.Sequential(nn.Linear(16, 64), *[block() for _ in range(6)], nn.Linear(64, 1))
styles = {"*.1": ColwiseParallel(), "*.3": RowwiseParallel()}
pipe = pykern.Pipeline(
    model,
    devices=devices,
    schedule="one_f_one_b",
    microbatches=4,
    loss_fn=F.mse_loss,
    process_group=mesh["dp"],
    tensor_parallel=(mesh["tp"], styles),
)
optimizer = pykern.ZeroOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
for step in range(10):
    # Other rows for each pipeline, the same for all shards of one.
    x, y = (t.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for t in batch(step))
    optimizer.zero_grad()
    loss = pipe.step(x, target=y)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
pipe.close()
dist.destroy_process_group()
