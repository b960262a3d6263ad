"""The sections of a run: each measures one thing that pykern does on some devices.

Models are the same on as many devices of a kind, and the names of figures tell both, so that two
boxes are compared by steps of the same model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activation import swiglu
from ..kernels.dropout import dropout
from ..kernels.norm import rms_norm
from ..models import next_token_loss
from ..partition import partition
from ..pipeline.pipeline import Pipeline
from ..runtime.devices import parse_devices
from ..schedules import by_name
from ..topo.copies import copies_ns
from .figures import Figure
from .gpt_task import GptTask
from .torch_processes import torch_steps

# Makes the figures of a section for devices, named as for `Pipeline`, and their number.
Section = Callable[[str, int], Iterator[Figure]]

_STEPS, _WARMUPS = 9, 3
# After so many seconds a figure takes no further step, once it has the two times that it needs.
_FIGURE_S = 20.0
_TINY, _TINY_ROWS = 16, 4
# Width, heads, context and rows of a microbatch, on CPU workers and on GPUs.
_SIZES = {"cpu": (128, 4, 64, 2), "cuda": (2048, 16, 1024, 4)}
_COPIED_BYTES = 2**28
# Rows and columns for fused kernels.
_FUSED = 4096, 4096
# Other pipelines of one process: package, module, class. Their constructors are alike.
_PEERS = (("torchgpipe", "torchgpipe", "GPipe"), ("fairscale", "fairscale.nn", "Pipe"))


def memory(_: str, __: int) -> Iterator[Figure]:
    """Copies in the host's memory on one thread."""
    yield _in_ms("host copy of 256 MiB", copies_ns(_COPIED_BYTES, _STEPS))


def dispatch(devices: str, num_devices: int) -> Iterator[Figure]:
    """Steps of layers that take no time to speak of: the cost of actions."""
    layers = [nn.Linear(_TINY, _TINY) for _ in range(num_devices)]
    num_microbatches = 64
    x, y = torch.randn(2, _TINY_ROWS * num_microbatches, _TINY)
    with Pipeline(
        layers, devices=devices, microbatches=num_microbatches, loss_fn=F.mse_loss
    ) as pipe:
        times = _steps(pipe, x, y)
    # Each cell has an F and a B; times are in nanoseconds.
    per_action = 1e3 * 2 * num_devices * num_microbatches
    name = f"a tiny action, {_on(devices, num_devices)}"
    yield Figure(name, "us", tuple(one / per_action for one in times))


def by_schedule(devices: str, num_devices: int) -> Iterator[Figure]:
    """A GPT under several schedules, measured and predicted."""
    num_microbatches = 2 * num_devices
    for name in ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v"):
        plan = by_name[name](num_devices, num_microbatches)
        model, x, y = _gpt(devices, num_devices, num_microbatches)
        with Pipeline(model, devices=devices, schedule=plan, loss_fn=next_token_loss) as pipe:
            times = _steps(pipe, x, y)
            with pipe.tracing():
                pipe.step(x, target=y)
            predicted = pipe.prediction().makespan_ns / 1e6
        title = f"a GPT's step, {name}, {_on(devices, num_devices)}"
        yield _in_ms(title, times, predicted)


def recompute(devices: str, num_devices: int) -> Iterator[Figure]:
    """The same GPT under GPipe, where all stages of any number have an R."""
    times = _gpt_steps(devices, num_devices, schedule="gpipe", recompute="stage")
    yield _in_ms(f"a GPT's step, gpipe, recomputed, {_on(devices, num_devices)}", times)


def links(devices: str, num_devices: int) -> Iterator[Figure]:
    """Copies from each GPU to each other one, and between each and the host. Workers have none."""
    del num_devices
    names = {str(lane.device): lane.device for lane in parse_devices(devices)}
    gpus = {name: device for name, device in names.items() if device.type == "cuda"}
    ends = {"pinned memory": torch.device("cpu"), **gpus}
    for (sender, of_sender), (receiver, of_receiver) in product(ends.items(), repeat=2):
        if sender == receiver:
            continue
        source, into = (_bytes_on(device) for device in (of_sender, of_receiver))
        times = _timed(partial(_copy, into, source))
        yield _in_ms(f"copy of 256 MiB, {sender} to {receiver}", times)


def fused(devices: str, num_devices: int) -> Iterator[Figure]:
    """Fused kernels, forward and backward, beside plain torch. Workers have none."""
    del num_devices
    device = parse_devices(devices)[0].device
    if device.type != "cuda":
        return
    rows, width = _FUSED
    x, wide, weight = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((rows, width), (rows, 2 * width), (width,))
    )
    ways: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (width,), w, 1e-6), (x, weight)),
        "swiglu": (swiglu, _plain_swiglu, (wide,)),
        "dropout": (partial(dropout, rate=0.1), partial(F.dropout, p=0.1), (x,)),
    }
    for name, (ours, plain, tensors) in ways.items():
        for who, function in (("pykern", ours), ("plain torch", plain)):
            times = _timed(partial(_both_ways, function, tensors))
            yield _in_ms(f"{name}, forward and backward, {who}", times)


def capture(devices: str, num_devices: int) -> Iterator[Figure]:
    """The GPT's step replayed from CUDA graphs. Workers have none."""
    if parse_devices(devices)[0].device.type != "cuda":
        return
    for of_graphs, way in (("a graph per action", True), ("one graph", "step")):
        times = _gpt_steps(devices, num_devices, schedule="one_f_one_b", capture=way)
        title = f"a GPT's step, one_f_one_b, {of_graphs}, {_on(devices, num_devices)}"
        yield _in_ms(title, times)


def inference(devices: str, num_devices: int) -> Iterator[Figure]:
    """Batches through the same GPT in a stream."""
    model, x, _ = _gpt(devices, num_devices, 1)
    with Pipeline(model, devices=devices, microbatches=1) as pipe, torch.no_grad():
        times = _timed(partial(_stream, pipe, [x] * (4 * num_devices)))
    yield _in_ms(f"a GPT's stream of batches, {_on(devices, num_devices)}", times)


def peers(devices: str, num_devices: int) -> Iterator[Figure]:
    """The GPT's step under GPipe by other pipelines of one process, where they are installed."""
    num_microbatches = 2 * num_devices
    homes = [lane.device for lane in parse_devices(devices)]
    for package, module, made_by in _PEERS:
        if find_spec(package) is None:
            continue
        model, x, y = _gpt(devices, num_devices, num_microbatches)
        with warnings.catch_warnings():
            # They say of themselves that they are deprecated.
            warnings.simplefilter("ignore")
            pipe = getattr(import_module(module), made_by)(
                model,
                balance=[len(stage) for stage in partition(model, num_devices).stages],
                devices=homes,
                chunks=num_microbatches,
                checkpoint="never",
            )
        times = _timed(partial(_step, pipe, x.to(homes[0]), y.to(homes[-1])))
        yield _in_ms(f"a GPT's step, {package}, {_on(devices, num_devices)}", times)


def torch_pipelining(devices: str, num_devices: int) -> Iterator[Figure]:
    """The GPT's step by the schedules of torch.distributed.pipelining, in processes."""
    task = _task(devices, num_devices, 2 * num_devices)
    for schedule, times in torch_steps(task, devices, _WARMUPS, _STEPS):
        yield _in_ms(f"a GPT's step, torch's {schedule}, {_on(devices, num_devices)}", times)


SECTIONS: Mapping[str, Section] = {
    "memory": memory,
    "dispatch": dispatch,
    "schedules": by_schedule,
    "recompute": recompute,
    "capture": capture,
    "links": links,
    "kernels": fused,
    "inference": inference,
    "peers": peers,
    "torch.distributed.pipelining": torch_pipelining,
}


def _on(devices: str, num_devices: int) -> str:
    """The devices in the name of a figure."""
    return f"{num_devices} x {parse_devices(devices)[0].device.type}"


def _task(devices: str, num_devices: int, num_microbatches: int) -> GptTask:
    sizes = _SIZES[parse_devices(devices)[0].device.type]
    return GptTask(num_devices, num_microbatches, *sizes)


def _gpt(
    devices: str, num_devices: int, num_microbatches: int
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A GPT with two blocks for each device, and a batch for it."""
    task = _task(devices, num_devices, num_microbatches)
    return task.model(), *task.batch()


def _gpt_steps(devices: str, num_devices: int, **more: Any) -> list[int]:
    """The times of the GPT's steps, in twice as many microbatches as devices."""
    model, x, y = _gpt(devices, num_devices, 2 * num_devices)
    arguments = {"microbatches": 2 * num_devices, "loss_fn": next_token_loss, **more}
    with Pipeline(model, devices=devices, **arguments) as pipe:
        return _steps(pipe, x, y)


def _steps(pipe: Pipeline, x: Tensor, y: Tensor) -> list[int]:
    """The times of steps in nanoseconds, until their losses are on the host."""
    return _timed(lambda: pipe.step(x, target=y).item())


def _step(pipe: nn.Module, x: Tensor, y: Tensor) -> None:
    """A step with the loss outside of the pipeline, until the loss is on the host."""
    loss = next_token_loss(pipe(x), y)
    loss.backward()
    loss.item()


def _stream(pipe: Pipeline, batches: Sequence[Tensor]) -> None:
    for output in pipe.stream(batches):
        _wait_for(output)


def _timed(step: Callable[[], object]) -> list[int]:
    """The times in nanoseconds, without those of the first steps.

    Steps that are slow are fewer, and the last two count at least.
    """
    times: list[int] = []
    while len(times) < _WARMUPS + _STEPS:
        if len(times) >= 2 and sum(times) > 1e9 * _FIGURE_S:
            break
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return times[min(_WARMUPS, len(times) - 2) :]


def _bytes_on(device: torch.device) -> Tensor:
    """Bytes to copy; those of the host are pinned."""
    pinned = device.type == "cpu"
    return torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source, non_blocking=True)
    for device in {into.device, source.device}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _both_ways(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> None:
    made = function(*tensors)
    torch.autograd.grad(made, tensors, torch.ones_like(made))
    torch.cuda.synchronize(made.device)


def _plain_swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def _wait_for(output: Tensor) -> None:
    """Returns when the last number of an output is on the host."""
    output.flatten()[-1].item()


def _in_ms(name: str, times_ns: Sequence[float], predicted: float | None = None) -> Figure:
    return Figure(name, "ms", tuple(one / 1e6 for one in times_ns), predicted)
