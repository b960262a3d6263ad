"""A kernel that hangs in stage 2, called and in graphs: the first line of the report."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.schedules import one_f_one_b

from .frame import Json
from .tools import DEVICE
from .variants import FOURS, WARM_UP, Capture, finish, of_each

PLAN = one_f_one_b(4, 4)
TIMEOUT_S = 0.5
# Waits while the flag is set, for 6 s at most: nothing hangs for good.
SOURCE = r"""
extern "C" __global__ void hold(volatile int* flag) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    now = start;
    while (*flag && now - start < 6000000000ull) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    }
}
"""


class Hold(nn.Module):
    """Passes on what it gets, behind a kernel that waits while the flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self._cupy = importlib.import_module("cupy")
        self._kernel = self._cupy.RawKernel(SOURCE, "hold")
        # The host has it, and changes it at once: work of a stream may come behind the kernel.
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def forward(self, x: Tensor) -> Tensor:
        with self._cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self._kernel((1,), (1,), (self.flag.data_ptr(),))
        return x.clone()


def run(folder: Path) -> Json:
    return {name: of_each(partial(reported, devices)) for name, devices in FOURS.items()}


def control() -> bool:
    """A kernel that ends."""
    return report_of(FOURS["streams"], capture=False, hangs=False) is None


def reported(devices: Any, capture: Capture) -> Json:
    """Raises RuntimeError if the report does not name the action, or there is no report."""
    report = report_of(devices, capture, hangs=True)
    if report is None or not report.startswith("stage 2, microbatch 0, action 2F0, device 2 has"):
        raise RuntimeError(f"the report must name stage 2's first forward, got {report}")
    return {"report": report}


def report_of(devices: Any, capture: Capture, *, hangs: bool) -> str | None:
    """The first line about a step, in three times the timeout; None if nothing is reported."""
    hold = Hold()
    linears = [nn.Linear(16, 16) for _ in range(PLAN.num_stages)]
    layers = nn.Sequential(*linears[:2], nn.Sequential(linears[2], hold), linears[3]).to(DEVICE)
    x = torch.randn(8, 16, device=DEVICE)
    with pykern.Pipeline(
        layers,
        devices=devices,
        schedule=PLAN,
        loss_fn=F.mse_loss,
        capture=capture,
        timeout=TIMEOUT_S,
    ) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=x)
        hold.flag.fill_(int(hangs))
        finish()
        pipe.step(x, target=x)
        time.sleep(3 * TIMEOUT_S)
        try:
            pipe.step(x, target=x)
        except pykern.PipelineStalled as stalled:
            return str(stalled).partition("\n")[0]
        finally:
            hold.flag.zero_()
            finish()
    return None
