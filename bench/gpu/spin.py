"""Stages that take the time they are told to, on one block of one multiprocessor."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pykern.plan import Costs

from .tools import DEVICE, elapsed_ms, own_stream

# Issues work of so many microseconds on the current stream.
Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Times:
    """Times that a stage is told to take; B takes the two parts of backward together."""

    forward_us: float
    input_us: float
    weight_us: float


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Sleep, times: Times) -> Tensor:
        ctx.sleep, ctx.times = sleep, times
        sleep(times.forward_us)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep(ctx.times.input_us)
        return gradient.clone(), None, None


class _Weight(torch.autograd.Function):
    """Apart from the way of x, so that a split backward leaves it to W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sleep: Sleep, times: Times) -> Tensor:
        ctx.sleep, ctx.times = sleep, times
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep(ctx.times.weight_us)
        return gradient.clone(), None, None


class Spin(nn.Module):
    """x + entry + weight. The entry makes the first stage send gradients through as all others."""

    def __init__(self, sleep: Sleep, times: Times) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(1))
        self._sleep, self._times = sleep, times

    def forward(self, x: Tensor) -> Tensor:
        passed = _Forward.apply(x + self.entry, self._sleep, self._times)
        weight = _Weight.apply(self.weight, self._sleep, self._times)
        return passed + weight


def calibrated() -> Sleep:
    """Spinning that takes the microseconds asked for, by events, at the clock of right now."""
    stream = own_stream()

    def spin(cycles: float) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(cycles))

    # Until the clock has risen.
    elapsed_ms(partial(spin, 5e8), [stream])
    few, many = 2_000_000, 12_000_000

    def median_us(cycles: int) -> float:
        times = [elapsed_ms(partial(spin, cycles), [stream]) for _ in range(5)]
        return statistics.median(times) * 1e3

    # The difference, so that what a launch takes is not in it.
    cycles_per_us = (many - few) / (median_us(many) - median_us(few))
    return lambda us: torch.cuda._sleep(int(us * cycles_per_us))


def measured_costs(sleep: Sleep, times: Times, x: Tensor, rounds: int = 8) -> Costs:
    """Times of F and B of a stage alone, with the small kernels around the spinning."""
    stage = Spin(sleep, times).to(DEVICE)
    parameters = list(stage.parameters())
    stream = own_stream()
    outputs: list[Tensor] = []
    torch.autograd.set_multithreading_enabled(False)

    def forward() -> None:
        with torch.cuda.stream(stream):
            outputs.extend(stage(x) for _ in range(rounds))

    def backward() -> None:
        with torch.cuda.stream(stream):
            for output in outputs:
                torch.autograd.grad(output, parameters, torch.ones_like(output))

    # The first calls load kernels and start what backward needs: half a second on an H100.
    forward()
    backward()
    outputs.clear()
    forward_ms, backward_ms = elapsed_ms(forward, [stream]), elapsed_ms(backward, [stream])
    return Costs(forward_ns=forward_ms / rounds * 1e6, backward_ns=backward_ms / rounds * 1e6)
