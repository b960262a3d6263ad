"""Achieved GB/s of each fused operation, and its memory, beside eager, torch.compile and Liger.

Each contender is compared with plain torch before it is timed.
Forward and backward at Llama-8B's shape in bfloat16. Traffic is what an ideal kernel moves: every
argument and result of the forward once, and of the backward its incoming and outgoing gradients and
the arguments again, unless it does without. The share is of a copy measured in the same run.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .frame import Json
from .tools import DEVICE

TOKENS, WIDTH, HIDDEN = 8192, 4096, 14336
WARM_UPS, RUNS = 10, 50
MOST_ERROR = 0.02
# About a millisecond.
WAIT_CYCLES = 2_000_000

Function = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """One operation on given arguments.

    Attributes:
        ours: of pykern.
        plain: the same in plain torch.
        arguments: those that require grad get one.
        liger: module and function of Liger, with arguments of its own; None where it has none.
        is_random: two calls give different results, so that they are not compared.
        backward: numbers of the arguments as large as what the backward reads beside gradients that
            come in, and what it writes; None for each argument and each gradient.
    """

    ours: Function
    plain: Function
    arguments: tuple[Tensor, ...]
    liger: Callable[[], Function] | None = None
    backward: tuple[int, ...] | None = None
    is_random: bool = False


def run(folder: Path) -> Json:
    copy_gbs = copied_gbs(DEVICE)
    figures = {
        name: measure(operation, copy_gbs)
        for name, operation in operations(DEVICE, TOKENS, WIDTH, HIDDEN)
    }
    return {"copy_gbs": copy_gbs, "operations": figures}


def control() -> bool:
    """An operation that is wrong by a tenth."""
    x = torch.ones(8, 8, requires_grad=True)
    operation = Operation(ours=F.gelu, plain=F.gelu, arguments=(x,))
    check(operation, F.gelu)
    try:
        check(operation, lambda x: 1.1 * F.gelu(x))
    except ValueError:
        return True
    return False


def copied_gbs(device: torch.device, num_bytes: int = 2**30) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / time_ms(lambda: target.copy_(source)) / 1e6


def measure(operation: Operation, copy_gbs: float) -> Json:
    traffic = traffic_bytes(operation)
    found: Json = {"traffic_bytes": traffic}
    for name, make in contenders(operation).items():
        try:
            function = make()
            check(operation, function)
            ms, peak = time_ms(both(operation, function)), peak_bytes(operation, function)
        except ImportError as absent:
            found[name] = f"absent: {absent}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            gbs = traffic / ms / 1e6
            found[name] = {"ms": ms, "gbs": gbs, "share": gbs / copy_gbs, "peak_bytes": peak}
    return found


def check(operation: Operation, function: Function) -> None:
    """Raises ValueError if a function or its backward differs from the one in plain torch."""
    if operation.is_random:
        return
    pairs = zip(
        [*results(function(*operation.arguments)), *both(operation, function)()],
        [*results(operation.plain(*operation.arguments)), *both(operation, operation.plain)()],
        strict=True,
    )
    for number, (found, expected) in enumerate(pairs):
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        # Elements differ by what bfloat16 rounds, 0.4 %. NaN is not under the limit.
        if not error <= MOST_ERROR:
            raise ValueError(
                f"result {number} must differ from plain torch's by at most {MOST_ERROR} of its "
                f"norm, got {error:.3g}"
            )


def contenders(operation: Operation) -> dict[str, Callable[[], Function]]:
    def compiled(budget: float) -> Function:
        torch._dynamo.reset()
        config: Any = importlib.import_module("torch._functorch.config")
        with config.patch(activation_memory_budget=budget):
            function = torch.compile(operation.plain, dynamic=False)
            both(operation, function)()
        return function

    makers: dict[str, Callable[[], Function]] = {
        "pykern": lambda: operation.ours,
        "eager": lambda: operation.plain,
        "compiled": lambda: compiled(1.0),
        "compiled, budget 0.7": lambda: compiled(0.7),
    }
    return makers | ({"liger": operation.liger} if operation.liger else {})


def both(operation: Operation, function: Function) -> Callable[[], Any]:
    """Forward and backward."""
    wanted = [argument for argument in operation.arguments if argument.requires_grad]
    gradients = [torch.ones_like(result) for result in results(function(*operation.arguments))]

    def step() -> Any:
        made = results(function(*operation.arguments))
        return torch.autograd.grad(made, wanted, gradients)

    return step


def results(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def traffic_bytes(operation: Operation) -> int:
    """Bytes that an ideal kernel moves."""
    sizes = [argument.nbytes for argument in operation.arguments]
    outputs = sum(made.nbytes for made in results(operation.plain(*operation.arguments)))
    if operation.backward is None:
        wanted = (a.nbytes for a in operation.arguments if a.requires_grad)
        backward = sum(sizes) + sum(wanted)
    else:
        backward = sum(sizes[number] for number in operation.backward)
    return (sum(sizes) + outputs) + (outputs + backward)


def peak_bytes(operation: Operation, function: Function) -> int | None:
    """Beyond what is there before; None on a CPU."""
    device = operation.arguments[0].device
    if device.type == "cpu":
        return None
    step = both(operation, function)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def time_ms(work: Callable[[], Any]) -> float:
    """The median, with a cold cache before each run.

    The GPU waits until a run is issued: else it would be timed waiting for Python between kernels.
    """
    cold = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    pairs = []
    for _ in range(WARM_UPS + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()
        torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs[WARM_UPS:])


def operations(
    device: torch.device, tokens: int, width: int, hidden: int
) -> Iterator[tuple[str, Operation]]:
    """By name; those of norms first."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    yield from norms(made(tokens, width), made(tokens, width), made(width), made(width))
    yield from activations(made(tokens, 2 * hidden), made(tokens, hidden), made(hidden))
    yield from others(made(tokens, width), width)


def norms(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor
) -> Iterator[tuple[str, Operation]]:
    # Imported late here and below: what a section is for can be asked without Triton.
    from pykern.kernels.norm import add_norm, layer_norm, rms_norm  # noqa: PLC0415

    shape = (x.shape[-1],)

    def added() -> Function:
        """Liger's gives the norm before the sum."""
        function = liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", 1e-6)
        return lambda *tensors: function(*tensors)[::-1]

    def plain_add(x: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x + d, F.rms_norm(x + d, shape, w, 1e-6)

    yield (
        "rms_norm",
        Operation(
            rms_norm,
            lambda x, w: F.rms_norm(x, shape, w, 1e-6),
            (x, weight),
            lambda: liger("rms_norm", "LigerRMSNormFunction", 1e-6),
        ),
    )
    yield (
        "add_rms_norm",
        Operation(
            lambda x, d, w: add_norm(x, d, w, kind="rms", eps=1e-6),
            plain_add,
            (x, delta, weight),
            added,
            # The sum and the weight; one gradient for both terms, and the weight's.
            (0, 2, 0, 2),
        ),
    )
    yield (
        "layer_norm",
        Operation(
            layer_norm,
            lambda x, w, b: F.layer_norm(x, shape, w, b),
            (x, weight, bias),
            lambda: liger("layer_norm", "LigerLayerNormFunction", 1e-5),
        ),
    )


def activations(gate_up: Tensor, x: Tensor, bias: Tensor) -> Iterator[tuple[str, Operation]]:
    from pykern.kernels.activation import geglu, gelu, swiglu  # noqa: PLC0415

    def halves(function: Function) -> Function:
        return lambda packed: function(*packed.chunk(2, -1))

    yield (
        "swiglu",
        Operation(
            swiglu,
            halves(lambda gate, up: F.silu(gate) * up),
            (gate_up,),
            lambda: halves(liger("swiglu", "LigerSiLUMulFunction")),
        ),
    )
    yield (
        "geglu",
        Operation(
            geglu,
            halves(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
            (gate_up,),
            lambda: halves(liger("geglu", "LigerGELUMulFunction")),
        ),
    )
    yield "gelu_bias", Operation(gelu, lambda x, b: F.gelu(x + b), (x, bias))


def others(x: Tensor, width: int) -> Iterator[tuple[str, Operation]]:
    from pykern.kernels.dropout import dropout  # noqa: PLC0415
    from pykern.kernels.rope import rope  # noqa: PLC0415

    heads = max(width // 128, 1)
    kv_heads = max(heads // 4, 1)
    packed = (heads + 2 * kv_heads) * (width // heads)
    qkv = torch.randn(1, len(x), packed, device=x.device, dtype=x.dtype).requires_grad_()

    def plain_rope(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = packed.unflatten(-1, (heads + 2 * kv_heads, width // heads)).transpose(-3, -2)
        q, k, v = split.split([heads, kv_heads, kv_heads], dim=-3)
        return turned(q), turned(k), v.contiguous()

    def ours(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rope(packed, heads, kv_heads)

    # Their backwards need nothing but the gradient.
    yield (
        "dropout",
        Operation(
            lambda x: dropout(x, 0.1),
            lambda x: F.dropout(x, 0.1),
            (x,),
            backward=(0,),
            is_random=True,
        ),
    )
    yield "rope", Operation(ours, plain_rope, (qkv,), backward=(0,))


def turned(x: Tensor) -> Tensor:
    """Rotary embedding by halves, as models write it."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = positions[:, None] * 10000.0**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def liger(module: str, name: str, *options: Any) -> Function:
    """A function of Liger-Kernel, with what it takes behind its tensors."""
    found = importlib.import_module(f"liger_kernel.ops.{module}")
    apply = getattr(found, name).apply
    return lambda *tensors: apply(*tensors, *options)
