"""The bounds of kernels by another project's judge: the sanitizer of triton-viz.

    python -m tests.kernels.second_opinion

The sanitizer asks z3 whether a load or store of any program can be outside of the tensors that a
launch was given. It computes no values, so places that a kernel reads from memory are 0 here. Each
launch is made once more for each tensor, which then lacks its last element. Every kernel that the
sanitizer can execute must be told for that, and for nothing else.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import builtins
import io
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import triton_viz  # type: ignore[import-not-found]
from torch import Tensor
from triton_viz.clients import Sanitizer  # type: ignore[import-not-found]
from triton_viz.core import patch  # type: ignore[import-not-found]

from pykern.kernels.gpu import launching

INSIDE, OUTSIDE = "inside", "outside"
CUT = "one element less: "
found: dict[str, Counter[str]] = {}


@dataclass(frozen=True)
class Kernel:
    """Takes the place of a kernel, asks the sanitizer, and does not run."""

    fn: Any
    kernel: Any

    def __getitem__(self, grid: Sequence[int]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            for tensor in tensors:
                # No kernel has run, so places in a tensor would be anything.
                if not tensor.is_floating_point():
                    tensor.zero_()
            name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
            told = found.setdefault(name, Counter())
            told[answer := verdict(self.kernel, grid, arguments, named)] += 1
            starts = Counter(tensor.data_ptr() for tensor in tensors)
            for place, tensor in enumerate(arguments):
                # Memory that is also under another argument would stay what it is.
                if (
                    answer == INSIDE
                    and isinstance(tensor, Tensor)
                    and starts[tensor.data_ptr()] == 1
                    and tensor.is_contiguous()
                    and tensor.numel() > 1
                ):
                    cut = (*arguments[:place], tensor.flatten()[:-1], *arguments[place + 1 :])
                    told[CUT + verdict(self.kernel, grid, cut, named)] += 1

        return launch


def verdict(
    kernel: Any, grid: Sequence[int], arguments: Sequence[Any], named: dict[str, Any]
) -> str:
    traced = triton_viz.trace(Sanitizer(abort_on_error=False))(kernel)
    try:
        with redirect_stdout(io.StringIO()):
            traced[grid](*arguments, **named)
    except Exception as error:
        return f"not executed: {error}"[-120:]
    [client] = traced.client_manager.clients.values()
    return OUTSIDE if client.records else INSIDE


def main() -> int:
    """Returns 0 if all that was executed is inside, and faults are seen in each such kernel."""
    launching.launched = lambda kernel: Kernel(kernel.fn, kernel)
    # triton-viz puts it beside a kernel, where helpers of other modules do not see it.
    vars(builtins)["_triton_viz_loop_patcher"] = patch._loop_patcher
    from tests.kernels.launches import launch_all  # noqa: PLC0415 - kernels are made by its import

    for dtype, num_rows, width, offset in (
        (torch.float32, 5, 20, 1),
        (torch.bfloat16, 16, 20, 0),
        (torch.float32, 4, 16, 0),
    ):
        launch_all(dtype, num_rows, width, offset)
    for name, told in sorted(found.items()):
        print(name, *(f"    {number} {what}" for what, number in sorted(told.items())), sep="\n")
    executed = [told for told in found.values() if told[INSIDE]]
    is_right = not any(told[OUTSIDE] for told in found.values())
    return 0 if is_right and executed and all(told[CUT + OUTSIDE] for told in executed) else 1


if __name__ == "__main__":
    sys.exit(main())
