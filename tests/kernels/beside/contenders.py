"""Operations of pykern, Liger and torch.compile on the same arguments, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.kernels import liger
from pykern.kernels.activation import swiglu
from pykern.kernels.cross_entropy import losses
from pykern.kernels.norm import layer_norm, rms_norm
from pykern.kernels.rope import rope

EPS = 1e-6
HEADS, KV_HEADS, HEAD_DIM, CLASSES = 32, 8, 128, 128256
Function = Callable[..., Any]


class Operation(NamedTuple):
    """One operation on given arguments.

    Attributes:
        arguments: those that require grad get one.
        plain: in plain torch; in float64 it is the truth.
        ours: of pykern.
        liger: Liger's, made when it is asked for.
        saves: whether the backward reads the arguments again.
        apart: whether forward and backward are counted apart: not where a forward makes gradients.
    """

    arguments: tuple[Tensor, ...]
    plain: Function
    ours: Function
    liger: Callable[[], Function]
    saves: bool = True
    apart: bool = True


def _made(*shape: int, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape) * scale
    return values.to(torch.bfloat16).to("cuda").requires_grad_()


def _rms_norm(rows: int, hidden: int, _: int) -> Operation:
    return Operation(
        (_made(rows, hidden, scale=2), _made(hidden)),
        lambda x, weight: F.rms_norm(x, (hidden,), weight, EPS),
        partial(rms_norm, eps=EPS),
        lambda: liger("rms_norm", "LigerRMSNormFunction", EPS),
    )


def _layer_norm(rows: int, hidden: int, _: int) -> Operation:
    return Operation(
        (_made(rows, hidden, scale=2), _made(hidden), _made(hidden)),
        lambda x, weight, bias: F.layer_norm(x, (hidden,), weight, bias, EPS),
        partial(layer_norm, eps=EPS),
        lambda: liger("layer_norm", "LigerLayerNormFunction", EPS),
    )


def _swiglu(rows: int, _: int, inner: int) -> Operation:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return Operation(
        (_made(rows, 2 * inner, scale=3),),
        plain,
        swiglu,
        lambda: liger("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    )


def _tables(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, as models of Hugging Face make them once for all layers."""
    pairs = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-2 * pairs / HEAD_DIM)
    both = torch.cat([angles, angles], -1)
    cos, sin = (table.to(like.dtype).to(like.device) for table in (both.cos(), both.sin()))
    return cos, sin


def _rope(rows: int, _: int, __: int) -> Operation:
    total = HEADS + 2 * KV_HEADS

    def split(packed: Tensor) -> tuple[Tensor, ...]:
        heads = packed.unflatten(-1, (total, HEAD_DIM)).transpose(-3, -2)
        return heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-3)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def plain(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(packed)
        tables = on_gpu if packed.is_cuda else exact
        return turned(q, *tables), turned(k, *tables), v.contiguous()

    def theirs() -> Function:
        function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction

        def both(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = split(packed)
            return *function.apply(q, k, *on_gpu), v.contiguous()

        return both

    packed = _made(1, rows, total * HEAD_DIM)
    on_gpu, exact = _tables(rows, packed), _tables(rows, torch.zeros((), dtype=torch.float64))
    ours = partial(rope, num_heads=HEADS, num_kv_heads=KV_HEADS)
    return Operation((packed,), plain, ours, theirs, saves=False)


class _Loss(torch.autograd.Function):
    """The mean loss, as pykern's fused head computes it of one chunk of logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        scale = torch.full((), 1 / len(target), device=logits.device)
        # The gradient takes the memory of the logits.
        ctx.gradient = logits.detach()
        found = losses(ctx.gradient, target, scale, logits.shape[1], -100)[0]
        return found.sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def _cross_entropy(rows: int, _: int, __: int) -> Operation:
    target = torch.randint(CLASSES, (rows,))

    def there(logits: Tensor) -> Tensor:
        return target.to(logits.device)

    def theirs() -> Function:
        found = importlib.import_module("liger_kernel.ops.cross_entropy")
        apply = found.LigerCrossEntropyFunction.apply
        return lambda logits: apply(logits, on_gpu, None)[0]

    on_gpu = target.to("cuda")
    return Operation(
        (_made(rows, CLASSES, scale=3),),
        lambda logits: F.cross_entropy(logits, there(logits)),
        lambda logits: _Loss.apply(logits, on_gpu),
        theirs,
        apart=False,
    )


OPERATIONS: dict[str, Callable[[int, int, int], Operation]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "cross entropy": _cross_entropy,
}
