"""The examples of the guide run as it says, and all train the same model."""

import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests import peers
from tests.diagonal import nightly

FOLDER = Path(__file__).parents[2] / "docs/examples"

# By name: processes, which torchrun starts where they are several.
EXAMPLES = {
    "plain.py": 1,
    "replicas.py": 1,
    "data_parallel.py": 2,
    "tensor_parallel.py": 2,
    "zero1.py": 2,
    "data_tensor_pipeline.py": 4,
}


def launched(name: str, processes: int) -> str:
    """The output of the example, run as its guide says."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    ran = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else ["-W", "error"]), str(FOLDER / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr
    return ran.stdout


def within(rank: int, name: str, processes: int, port: int) -> str:
    """The output of the example in this process, with the environment that torchrun makes."""
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return printed.getvalue()


def forked(name: str, processes: int) -> str:
    """The same without a new interpreter for each process, of which each imports torch."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first, *others = peers.run(processes, within, name, processes, store.port)
    assert not any(others)
    return str(first)


def losses(printed: str) -> list[float]:
    """The losses of ten steps."""
    found = re.findall(r"^step (\d): loss (\d\.\d{4})$", printed, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(10))
    return [float(loss) for _, loss in found]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(launched("plain.py", 1))


# Torch is imported by the launcher too, and by every process.
@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("run", [forked, nightly(launched)])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "plain.py"])
def test_an_example_trains_as_the_plain_one(
    plain: list[float], name: str, run: Callable[[str, int], str]
) -> None:
    found = losses(run(name, EXAMPLES[name]))
    # Sums in other orders differ in last bits, which may move the last of the four digits that are
    # printed by one. Other tests compare bits.
    assert found == pytest.approx(plain, abs=1.01e-4)
    assert found[-1] < found[0]
