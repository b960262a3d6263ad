"""Trains a small model in two stages, in one process.

python after.py FILE
"""

import sys

import torch
from torch import Tensor, nn

from pykern.interop.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pykern.interop.pipelining import ranks as dist

NUM_MICROBATCHES = 4


class Block(nn.Module):
    """A residual block of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(self.inner(self.norm(x)))
        return out


def make_stage(rank: int, num_stages: int, device: torch.device) -> PipelineStage:
    """Builds the whole model, and takes this rank's part of it."""
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(4)]
    size = len(blocks) // num_stages
    part = nn.Sequential(*blocks[rank * size : (rank + 1) * size]).to(device)
    return PipelineStage(part, rank, num_stages, device)


def main(file: str) -> None:
    """Some steps by two schedules; saves each rank's losses and parameters."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    results = {}
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        stage = make_stage(rank, world_size, device)
        schedule = schedule_class(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
        torch.manual_seed(1)
        seen = []
        for _ in range(3):
            x, y = torch.randn(8, 16), torch.randn(8, 16)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                losses: list[Tensor] = []
                output = schedule.step(target=y, losses=losses)
                seen += [torch.stack(losses).detach(), output.detach()]
            optimizer.step()
        results[schedule_class.__name__] = seen, stage.submod.state_dict()
    torch.save(results, f"{file}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.run(main, 2, sys.argv[1])
