"""The public operations of pykern.kernels, beside the same in plain torch.

`check` compares results and gradients with plain torch in float64. On tensors of the CPU,
`launching` has Triton's interpreter run the kernels for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.kernels.activation import geglu, gelu, swiglu
from pykern.kernels.activation_linear import gated_linear, gelu_linear
from pykern.kernels.experts import experts
from pykern.kernels.head_loss import LazyLogits, LinearCrossEntropy
from pykern.kernels.linear_cross_entropy import linear_cross_entropy
from pykern.kernels.norm import add_norm, layer_norm, rms_norm
from pykern.kernels.norm_linear import norm_linear
from pykern.kernels.rope import rope
from pykern.kernels.routing import balance_loss, route
from tests.kernels.acceptance import ulp

EPS = 1e-5
NUM_EXPERTS, CHOSEN, HEADS, KV_HEADS = 4, 2, 4, 2
# Half the distance between two numbers near 1.
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
Function = Callable[..., Any]


class Sizes(NamedTuple):
    """Tokens, columns of a token, columns of an activation, and classes."""

    tokens: int
    width: int
    inner: int
    classes: int


class Public(NamedTuple):
    """An operation.

    Attributes:
        shapes: of its arguments, which get gradients.
        ours: of pykern.
        plain: the same in torch's own operations.
        roundings: to the type of the arguments, one after another, in the longest way to a result
            or gradient.
    """

    shapes: Sequence[tuple[int, ...]]
    ours: Function
    plain: Function
    roundings: int = 1


def _norms(s: Sizes) -> dict[str, Public]:
    x, row = (s.tokens, s.width), (s.width,)
    out, outs = (s.inner, s.width), (s.inner,)

    def norm(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if kind == "rms":
            return F.rms_norm(x, row, weight, EPS)
        return F.layer_norm(x, row, weight, bias, EPS)

    def added(x: Tensor, delta: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return x + delta, norm("layer", x + delta, *weights)

    def linear(x: Tensor, delta: Tensor, scale: Tensor, *weights: Tensor) -> Any:
        return x + delta, F.linear(norm("rms", x + delta, scale), *weights)

    def ours(x: Tensor, delta: Tensor, scale: Tensor, *weights: Tensor) -> Any:
        return norm_linear(x, delta, scale, None, *weights, kind="rms", eps=EPS)

    return {
        "rms_norm": Public([x, row], partial(rms_norm, eps=EPS), partial(norm, "rms")),
        "layer_norm": Public([x, row, row], partial(layer_norm, eps=EPS), partial(norm, "layer")),
        "add_norm": Public(
            [x, x, row, row], partial(add_norm, kind="layer", eps=EPS), added, roundings=2
        ),
        "norm_linear": Public([x, x, row, out, outs], ours, linear, roundings=3),
    }


def _activations(s: Sizes) -> dict[str, Public]:
    both, one, bias = (s.tokens, 2 * s.inner), (s.tokens, s.inner), (s.inner,)
    down, outs = (s.width, s.inner), (s.width,)

    def gated(activation: Function, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return activation(gate) * up

    tanh = partial(F.gelu, approximate="tanh")
    return {
        "swiglu": Public([both], swiglu, partial(gated, F.silu)),
        "geglu": Public([both], geglu, partial(gated, tanh)),
        "gelu": Public([one, bias], gelu, lambda x, b: F.gelu(x + b)),
        "gelu, tanh": Public(
            [one, bias], partial(gelu, approximate="tanh"), lambda x, b: tanh(x + b)
        ),
        "gated_linear": Public(
            [both, down, outs],
            gated_linear,
            lambda x, *weights: F.linear(gated(F.silu, x), *weights),
            roundings=2,
        ),
        "gelu_linear": Public(
            [one, bias, down, outs],
            gelu_linear,
            lambda x, b, *weights: F.linear(F.gelu(x + b), *weights),
            roundings=2,
        ),
    }


def _turned(x: Tensor) -> Tensor:
    """Rotary embedding in float64, of heads [.., tokens, head_dim]."""
    half = x.shape[-1] // 2
    pairs = torch.arange(half, dtype=torch.float64)
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-pairs / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _others(s: Sizes) -> dict[str, Public]:
    total = HEADS + 2 * KV_HEADS
    head_dim = max(s.width // HEADS // 2 * 2, 2)

    def rotated(packed: Tensor) -> tuple[Tensor, ...]:
        heads = packed.unflatten(-1, (total, head_dim)).transpose(-3, -2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-3)
        return _turned(q), _turned(k), v

    def weights(logits: Tensor) -> Tensor:
        return logits.topk(CHOSEN, -1).values.softmax(-1)

    def balance(logits: Tensor) -> Tensor:
        shares = F.one_hot(logits.topk(CHOSEN, -1).indices, NUM_EXPERTS).double().mean((0, 1))
        return NUM_EXPERTS * (logits.softmax(-1).mean(0) * shares).sum()

    def mixed(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        share = torch.zeros_like(logits).scatter(
            -1, logits.topk(CHOSEN, -1).indices, weights(logits)
        )
        gate, up = torch.einsum("nw,ehw->neh", x, gate_up).chunk(2, -1)
        return torch.einsum("neh,ewh,ne->nw", F.silu(gate) * up, down, share)

    hidden = min(s.inner, 128) // 16 * 16
    logits = (s.tokens, NUM_EXPERTS)
    matrices = [(NUM_EXPERTS, 2 * hidden, s.width), (NUM_EXPERTS, s.width, hidden)]
    return {
        "rope": Public(
            [(s.tokens, total * head_dim)],
            partial(rope, num_heads=HEADS, num_kv_heads=KV_HEADS),
            rotated,
        ),
        "route": Public([logits], lambda x: route(x, CHOSEN).weights, weights),
        "balance_loss": Public([logits], lambda x: balance_loss(x, route(x, CHOSEN)), balance),
        "experts": Public(
            [(s.tokens, s.width), logits, *matrices],
            lambda x, y, *m: experts(x, route(y, CHOSEN), *m),
            mixed,
            # Five, and gradients of weights are small differences of large sums.
            roundings=12,
        ),
    }


def _losses(s: Sizes) -> dict[str, Public]:
    target = torch.arange(s.tokens) * 7 % s.classes
    target[1:2] = -100
    shapes = [(s.tokens, s.width), (s.classes, s.width)]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        # Logits of a model are no larger.
        return F.cross_entropy(hidden @ weight.t(), target)

    def there(x: Tensor) -> Tensor:
        return target.to(x.device)

    def lazy(x: Tensor, weight: Tensor) -> Tensor:
        return LinearCrossEntropy()(LazyLogits(x, weight), there(x))

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, there(x))

    return {
        "linear_cross_entropy": Public(shapes, fused, plain, roundings=3),
        "LinearCrossEntropy": Public(shapes, lazy, plain, roundings=3),
    }


def operations(sizes: Sizes) -> dict[str, Public]:
    return _norms(sizes) | _activations(sizes) | _others(sizes) | _losses(sizes)


def check(operation: Public, dtype: torch.dtype, device: torch.device) -> None:
    """Compares results and gradients with float64.

    The difference of a tensor is at most that of independent roundings, to nearest, of numbers
    whose mantissas are small. The difference of an element is at most an ulp, or for roundings on
    the way three times what they are apart. Sums in float32 may add some of float32's roundings.

    Raises:
        AssertionError: the difference is larger.
    """
    torch.manual_seed(1)
    num_tokens = operation.shapes[0][0]
    given = [_random(shape, num_tokens).to(dtype) for shape in operation.shapes]
    found = _ran(operation.ours, [x.to(device) for x in given])
    exact = _ran(operation.plain, [x.double() for x in given])
    allowed = 0.6 * operation.roundings**0.5 * HALF_ULP[dtype] + 2.0**-19
    for number, (ours, right) in enumerate(zip(found, exact, strict=True)):
        off = (ours.cpu().double() - right).abs()
        assert right.norm() > 0, f"tensor {number} is 0"
        error = float(off.norm() / right.norm())
        assert error <= allowed, f"tensor {number} is off by {error}, and not by {allowed} at most"
        usual = right.abs().clamp(min=float(right.square().mean().sqrt()))
        unit = (2 * operation.roundings - 1) * ulp(usual, dtype) + 2.0**-19 * usual
        worst = float((off / unit).max())
        assert worst <= 1, f"an element of tensor {number} is off by {worst} times its limit"


def _random(shape: tuple[int, ...], num_tokens: int) -> Tensor:
    """Weights keep the size of what is multiplied with them."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[0] != num_tokens else 1.0
    return torch.randn(shape) * scale


def _ran(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients of all arguments."""
    leaves = [x.requires_grad_() for x in given]
    made = function(*leaves)
    results = list(made) if isinstance(made, tuple) else [made]
    generator = torch.Generator().manual_seed(2)
    # The same for both, and numbers of 8 bits, which all types have.
    incoming = [(torch.randint(-8, 9, x.shape, generator=generator) / 8).to(x) for x in results]
    gradients = torch.autograd.grad(results, leaves, incoming)
    return [x.detach() for x in (*results, *gradients)]


class _Launching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pykern":
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            return func.redispatch(keys, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def launching() -> Iterator[None]:
    """Within it operations on tensors of the CPU launch the kernels for GPUs."""
    with pytest.MonkeyPatch.context() as patch, _Launching():
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        yield
