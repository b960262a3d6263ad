"""The pages' examples of plans on torch's runtime; the example runs as on two boxes."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "plan_on_torch.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_on_two_boxes() -> str:
    """The output of both; each box has one device."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *rendezvous]
    command += ["--rdzv-id", "two-boxes", "--nproc-per-node", "1", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    boxes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        for _ in range(2)
    ]
    try:
        said = [box.communicate(timeout=150)[0] for box in boxes]
        assert [box.returncode for box in boxes] == [0, 0], said
        return "".join(said)
    finally:
        for box in boxes:
            with suppress(ProcessLookupError):
                os.killpg(box.pid, signal.SIGKILL)


def plain_losses() -> list[float]:
    """The example's training without a pipeline, on the whole batch."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(10):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss: Tensor = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.nightly
def test_two_boxes_train_as_one_process_does() -> None:
    printed = re.findall(r"step (\d+): loss (\d\.\d{4})\n", run_on_two_boxes())
    assert [int(step) for step, _ in printed] == list(range(10))
    losses = torch.tensor([float(loss) for _, loss in printed])
    # Half a unit of the last digit printed, and as much for another order of sums over ten steps.
    assert torch.allclose(losses, torch.tensor(plain_losses()), rtol=0, atol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("_group_of_one")
def test_what_the_page_shows_runs() -> None:
    page = (DOCS / "plan-files.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    modules = [nn.Linear(4, 4) for _ in range(2)]
    schedule = names["schedule_of"](0, 1, modules, torch.device("cpu"), nn.functional.mse_loss)
    x = torch.ones(8, 4)
    losses: list[Tensor] = []
    schedule.step(x, target=x, losses=losses)
    model = nn.Sequential(*modules)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    # Eight equal rows, in sums of which either side rounds seven times, each by 2**-24 at most.
    torch.testing.assert_close(torch.stack(losses), loss.detach().expand(8), rtol=1e-6, atol=0)
    wanted = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
