"""The work of torchrun, for tests: a process for each rank. Forks, so that torch is imported
once."""

import multiprocessing
import os
import runpy
import sys

import torch
import torch.distributed.pipelining


def be(rank: int, size: int, port: str, script: str, args: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def main(size: int, port: str, script: str, args: list[str]) -> int:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=be, args=(rank, size, port, script, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
