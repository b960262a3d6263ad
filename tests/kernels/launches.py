"""Launches every kernel on a stand-in for a GPU, with the JIT and directly, and compares them.

As a program, `python -m tests.kernels.launches`, it prints a line of JSON: by kernel, how often it
was launched, and how many functions of it there are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from pykern.kernels.activation import Activation
from pykern.kernels.gpu import (
    activation,
    cross_entropy,
    dropout,
    launching,
    rope,
    routing,
    row_sums,
    stash,
    weighted_swiglu,
)
from pykern.kernels.gpu import (
    norm_operation as norm,
)
from pykern.kernels.gpu.launching import Launched
from pykern.kernels.gpu.triton_private import is_watched
from tests.kernels.stand_in import StandIn, stand_in

TYPES = (torch.float32, torch.bfloat16)
# Numbers that are 1, divisible by 16, and neither; and elements before the first of a tensor.
SIZES, OFFSETS = (1, 12, 16, 20), (0, 1, 4)


class Comparison:
    """Launches thrice: by the JIT, directly for the first time, and directly again."""

    def __init__(self, driver: StandIn) -> None:
        self._driver = driver
        self._direct = Launched._launch
        self._jit = JITFunction.run
        self.num_by_jit = 0
        self.num_launches: dict[str, int] = {}
        self.functions: dict[str, set[int]] = {}

    def run(self, kernel: Any, *arguments: Any, **named: Any) -> Any:
        self.num_by_jit += 1
        return self._jit(kernel, *arguments, **named)

    def launch(self, kernel: Launched, grid: Sequence[int], *arguments: Any, **named: Any) -> None:
        ways = [kernel.kernel[grid], *[partial(self._direct, kernel, grid)] * 2]
        self._driver.launches.clear()
        counts = []
        for way in ways:
            way(*arguments, **named)
            counts.append(self.num_by_jit)
        assert counts[2] == counts[1]
        by_jit, first, again = self._driver.launches
        assert by_jit.equals(first)
        assert by_jit.equals(again)
        assert again.hooks == (None, None, None)
        name = kernel.kernel.fn.__module__.rpartition(".")[2] + "." + kernel.kernel.fn.__name__
        self.num_launches[name] = self.num_launches.get(name, 0) + 1
        self.functions.setdefault(name, set()).add(again.place[4])


@contextmanager
def compared(driver: StandIn) -> Iterator[Comparison]:
    """Compares every launch within it."""
    comparison = Comparison(driver)

    def launch(kernel: Launched, *given: Any, **named: Any) -> None:
        comparison.launch(kernel, *given, **named)

    def run(kernel: Any, *given: Any, **named: Any) -> Any:
        return comparison.run(kernel, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launched, "_launch", launch)
        patch.setattr(JITFunction, "run", run)
        yield comparison


def made(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """A tensor whose first element is so many elements from an aligned address."""
    room = torch.zeros(offset + torch.Size(shape).numel(), dtype=dtype)
    return room[offset:].view(shape)


def launch_all(dtype: torch.dtype, rows: int, width: int, offset: int) -> None:
    """Launches every kernel with tensors of about that many rows and columns."""
    like = partial(made, dtype=dtype, offset=offset)
    x, both, row = like(rows, width), like(rows, 2 * width), like(width)
    kinds: list[tuple[Activation, Tensor | None]] = [("swiglu", None), ("gelu", row)]
    for kind, bias in kinds:
        source = x if bias is not None else both
        activation.activated(source, bias, kind)
        activation.differentiated(x, source, bias, kind, rows == 1)
    target, scale = torch.zeros(rows, dtype=torch.int64), torch.tensor(1.0)
    losses, sums = cross_entropy.losses_of_rows(x, target, scale, width, -100)
    cross_entropy.gradients_of_rows(x, sums, target, losses[0], width, -100)
    for seed, place in ((width, None), (rows, target)):
        dropout.masked(x, 0.5, seed, place)
        for delta, bias in ((None, None), (x, row)):
            rate = 0.0 if bias is None else 0.25
            given = (row, bias, 1e-5, bias is not None)
            _, _, rstd, mean = norm.add_and_normalise(x, delta, *given, dtype, rate, seed, place)
            norm.gradients(x, delta, x, row, bias, rstd, mean, 1e-5, bias is not None, rows == 1)
    q, k, v = rope.turned(like(2, rows, 6 * 16), 4, 1, 10000.0, rows)
    rope.turned_back(q, k, v, 10000.0, width)
    weights, experts, order, places, _ = routing.chosen(x, min(width, 2))
    routing.chosen_gradient(weights, x, experts)
    row_sums.summed(x, places.view(rows, -1))
    weighted_swiglu.product(both[: len(order)], weights, order[:rows])
    weighted_swiglu.product_gradient(x, both, weights, order, rows == 1)
    stash.restored(*stash.quantised(x, "int8"), dtype)


def check_kinds(driver: StandIn, comparison: Comparison) -> None:
    """Each change of what a kernel depends on is a kind of its own, and no other change is."""
    kernel, places = row_sums._kernel, torch.zeros(2, 1, dtype=torch.int32)
    x = made(2, 64)

    def first(x: Tensor, width: float = 64, device: int = 0, **named: int) -> bool:
        """Whether a launch is the first of its kind; a second one never is."""
        driver.device = device
        options = {"NUM_TERMS": 1, "COLUMNS": 64, "num_warps": 4} | named
        before = comparison.num_by_jit
        for _ in range(2):
            launch(kernel, (2,), x, places, x, width, 64, **options)
        driver.device = 0
        return comparison.num_by_jit == before + 1

    launch = comparison._direct
    kernel._forms.clear()
    assert first(x)
    assert not first(torch.clone(x))
    assert first(made(2, 64, offset=1))
    assert first(x.bfloat16())
    assert first(x, width=1)
    assert first(x, width=1.0)
    assert first(x, width=65)
    assert first(x, device=1)
    assert first(x, COLUMNS=32)
    assert first(x, num_warps=8)
    assert not first(x)
    num_kinds = len(dropout._kernel._forms)
    for seed in (1, 5, 16, 2**40):
        dropout.masked(x, 0.5, seed, None)
    assert len(dropout._kernel._forms) <= num_kinds + 1


def check_hooks(driver: StandIn) -> None:
    """Hooks around launches are called as by the JIT; without one, nothing is told."""
    x, places = made(2, 64), torch.zeros(2, 1, dtype=torch.int32)
    told: list[Any] = []
    launch: Callable[[], Any] = partial(row_sums.summed, x, places)
    launch()
    driver.launches.clear()
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    for hook in hooks:
        hook.add(told.append)
        launch()
        hook.remove(told.append)
    assert len(told) == 2
    assert all(told), told
    launch()
    assert len(told) == 2
    assert [given.hooks == (None, None, None) for given in driver.launches] == [False, False, True]
    assert all(given.place == driver.launches[0].place for given in driver.launches)


def check_watched() -> None:
    """Anything that adds calls or changes how kernels are compiled, leaves launches to the JIT."""
    kernel = row_sums._kernel.kernel
    changes: list[tuple[Any, str, Any]] = [
        (knobs.runtime, "launch_enter_hook", print),
        (knobs.runtime, "launch_exit_hook", print),
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", print),
        (knobs.compilation, "instrumentation_mode", "cycles"),
        (kernel, "pre_run_hooks", [print]),
    ]
    for holder, name, value in changes:
        before = getattr(holder, name)
        assert not is_watched(kernel), name
        setattr(holder, name, value)
        assert is_watched(kernel), name
        setattr(holder, name, before)
    knobs.runtime.launch_enter_hook, before = None, knobs.runtime.launch_enter_hook
    assert not is_watched(kernel)
    knobs.runtime.launch_enter_hook = before


def check_limits() -> None:
    """Compiled forms that are too many are let go of, and nothing is kept that was refused."""
    kernel, places = row_sums._kernel, torch.zeros(2, 1, dtype=torch.int32)
    launching._MOST_FORMS = 3
    kernel._forms.clear()
    for width in range(64, 74):
        row_sums.summed(made(2, width), places)
        assert len(kernel._forms) <= 3
    knobs.runtime.jit_cache_hook = lambda **_: True
    kernel._forms.clear()
    row_sums.summed(made(2, 3), torch.zeros(2, 3, dtype=torch.int32))
    assert not kernel._forms
    knobs.runtime.jit_cache_hook = None


def main() -> None:
    driver = stand_in()
    with compared(driver):
        # On this device kernels are compiled, so the compiled kernel is Triton's own.
        driver.device = 2
        row_sums.summed(made(2, 64), torch.zeros(2, 1, dtype=torch.int32))
    driver.device = 0
    triton.compiler.compile = driver.compile
    with compared(driver) as comparison:
        for dtype, rows, width, offset in itertools.product(TYPES, SIZES, SIZES, OFFSETS):
            launch_all(dtype, rows, width, offset)
        norm._MOST_COLUMNS = norm._MOST_BACKWARD = 8
        launch_all(torch.float32, 4, 16, 0)
        check_kinds(driver, comparison)
    check_hooks(driver)
    check_watched()
    check_limits()
    numbers = {
        name: (number, len(comparison.functions[name]))
        for name, number in comparison.num_launches.items()
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
