"""The life of a small pipeline as a log, and the calls of one of its steps."""

from __future__ import annotations

import re
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import mse_loss

from bench.gpu.variants import FOURS, WARM_UP, Capture, finish, pipeline
from pykern.schedules import one_f_one_b

from .names import named
from .recording import Recorder, recording
from .torch_work import host_waits, in_graphs, on_streams

NUM_STAGES = 4
WIDTH = 16
PLAN = one_f_one_b(NUM_STAGES, 4)
_CALL = re.compile(r"\d+ cu")
_OBJECTS = re.compile(r"\*?(?:ctx|stream|event|graph|node|exec)\d+|\(.*\)")


def recorded(driver: str, device: torch.device, capture: Capture) -> str:
    """The log of a pipeline of four devices on one GPU: made, three steps and updates, closed.

    Args:
        driver: the path or name of its library.
        device: of the batch, `cuda:0`.
        capture: as for a pipeline. The third step is the first that is replayed.

    Returns:
        A line for each call of the extension, with names in place of addresses. Torch's work is
        there where it is called, or by graph.
    """
    with recording(driver) as recorder, in_graphs(recorder.add), host_waits(recorder.add):
        # Its own function, so that nothing of the pipeline is left when the recording ends.
        _run(recorder, device, capture)
    return named(recorder.text)


def _run(recorder: Recorder, device: torch.device, capture: Capture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)))
    x, y = torch.randn(2, 8, WIDTH).to(device)
    with pipeline(model, PLAN, FOURS["streams"], capture, mse_loss) as pipe:
        for number in range(1, WARM_UP + 1):
            recorder.add(f"step {number}")
            # A mode of the caller's would keep a step from being captured.
            with nullcontext() if capture else on_streams(recorder.add):
                pipe.step(x, target=y)
            recorder.add("update")
            with on_streams(recorder.add):
                _update(model)
        recorder.add("close")
        finish()


@torch.no_grad()
def _update(model: nn.Module) -> None:
    """Reads all gradients, and writes all that the next step reads and adds to."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad)
        parameter.grad.zero_()


def calls_of_step(log: str, number: int = WARM_UP) -> list[str]:
    """The calls of one step, in their order: thread, function and objects, without bytes."""
    step = log.partition(f"\n1 step {number}\n")[2].partition("\n1 update\n")[0]
    calls = [line.partition(" = ")[0].split() for line in step.splitlines() if _CALL.match(line)]
    return [
        " ".join([thread, function, *(word for word in words if _OBJECTS.fullmatch(word))])
        for thread, function, *words in calls
    ]
