"""The ranks of torch's runtime, a process each: every one loads plans, runs them, keeps gradients.

Run as a script by test_torch_runtime, with the folder of the job. torch is imported once: the ranks
are forks of the process that did.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH = 6
ROWS_PER_MICROBATCH = 2


def make_model(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(num_stages)
    ]


def make_batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    shape = (num_microbatches * ROWS_PER_MICROBATCH, WIDTH)
    return torch.randn(shape).double(), torch.randn(shape).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def run(folder: Path, rank: int, job: dict[str, Any]) -> dict[str, Tensor]:
    """One step by one plan; the gradients of this rank's stages."""
    num_stages, num_microbatches = len(job["device_of"]), job["num_microbatches"]
    model = make_model(num_stages)
    batch, target = make_batch(num_microbatches)
    example = batch[:ROWS_PER_MICROBATCH]
    output = example.clone().requires_grad_()
    stages = [
        PipelineStage(
            model[index],
            index,
            num_stages,
            torch.device("cpu"),
            input_args=output if index > 0 else example,
            output_args=output,
        )
        for index, device in enumerate(job["device_of"])
        if device == rank
    ]
    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_of)
    schedule._load_csv(str(folder / job["file"]), format=job["format"])
    local = {stage.stage_index for stage in stages}
    schedule.step(
        *((batch,) if 0 in local else ()),
        target=target if num_stages - 1 in local else None,
        return_outputs=False,
    )
    return {
        f"{index}.{name}": parameter.grad
        for index in local
        for name, parameter in model[index].named_parameters()
        if parameter.grad is not None
    }


def serve(folder: Path, rank: int, job: dict[str, Any]) -> None:
    store = FileStore(str(folder / "store"), job["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["num_ranks"])
    gradients = [run(folder, rank, plan) for plan in job["plans"]]
    torch.save(gradients, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=serve, args=(folder, rank, job)) for rank in range(job["num_ranks"])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
