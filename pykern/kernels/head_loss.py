"""The loss of a model's head in one pass: loss, gradient of hidden states, gradient of the weight.

If backward follows forward directly, as in the last stage of a pipeline, no tensor has to be saved
between the two, and logits are computed once. The gradient of the weight is added to its `.grad`,
or to its `main_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .linear_cross_entropy import FusedHead, Reduction, check, linear_cross_entropy


class LazyLogits(NamedTuple):
    """Logits hidden @ weight.T whose product is not computed yet.

    A head returns `LazyLogits` while it trains with gradients, and logits otherwise.

    Attributes:
        hidden: [..., h].
        weight: [V, h], the parameter itself.
    """

    hidden: Tensor
    weight: Tensor


class WithGradients(NamedTuple):
    """A loss whose backward has been done as far as the head goes.

    Attributes:
        loss: [], detached.
        outputs: the tensors where the rest of the backward starts; empty if no layer before the
            head trains.
        gradients: of the outputs.
    """

    loss: Tensor
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]


class LinearCrossEntropy:
    """Cross entropy of a head that returns `LazyLogits`, as the `loss_fn` of a pipeline.

    Args:
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, or "sum".

    Raises:
        ValueError: the reduction is unknown.
    """

    def __init__(self, ignore_index: int = -100, reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction

    def __call__(self, output: LazyLogits | Tensor, target: Tensor) -> Tensor:
        """The loss, for an ordinary backward.

        Args:
            output: `LazyLogits`, any such pair, or logits [..., V].
            target: int64 [...], see `linear_cross_entropy`.

        Returns:
            float32 [], or float64 if `output` is float64.

        Raises:
            TypeError: `output` has another type.
        """
        if isinstance(output, Tensor):
            logits = output.reshape(-1, output.shape[-1])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(
                logits,
                target.reshape(-1),
                ignore_index=self.ignore_index,
                reduction=self.reduction,
            )
        hidden, weight = _parts(output)
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def with_gradients(
        self, output: LazyLogits | Tensor, target: Tensor, share: float | Tensor
    ) -> WithGradients | None:
        """Computes loss and gradients in one pass, and adds up the weight's gradient.

        The gradient is added to `weight.main_grad` if the weight has one (float32), otherwise to
        `weight.grad`, which begins as zeros. A bfloat16 or float16 `.grad` is rounded after every
        chunk of rows.

        Args:
            output: as of a call.
            target: as of a call.
            share: the gradient of the loss, a number or a tensor without dimensions.

        Returns:
            The loss, and the tensors where the rest of the backward starts. None, without any
            effect, if `obstacle` returns a reason.
        """
        if self.obstacle(output) is not None:
            return None
        hidden, weight = _parts(output)
        dtype = check(hidden, weight, target, self.reduction)
        kind = hidden.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            rows, labels = hidden.reshape(-1, hidden.shape[-1]).to(dtype), target.reshape(-1)
            head = FusedHead(rows, weight.to(dtype), labels, self.ignore_index)
            of_hidden = torch.empty_like(rows) if hidden.requires_grad else None
            of_weight = _collected(weight) if weight.requires_grad else None
            type_of_loss = torch.promote_types(dtype, torch.float32)
            scale = torch.ones((), dtype=type_of_loss, device=hidden.device) * share
            if self.reduction == "mean":
                num_rows = (labels != self.ignore_index).sum()
                loss = head.in_one_pass(scale / num_rows, of_hidden, of_weight).sum() / num_rows
            else:
                loss = head.in_one_pass(scale, of_hidden, of_weight).sum()
        if of_hidden is None:
            return WithGradients(loss, (), ())
        return WithGradients(loss, (hidden,), (of_hidden.view(hidden.shape).to(hidden.dtype),))

    def obstacle(self, output: LazyLogits | Tensor) -> str | None:
        """The reason why a head's output cannot take one pass; None if it can."""
        if isinstance(output, Tensor):
            return "the head has multiplied the logits out"
        hidden, weight = _parts(output)
        if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
            return "nothing needs a gradient"
        if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
            return f"the weight is a {type(weight).__name__} of layout {weight.layout}"
        if weight.requires_grad and not weight.is_leaf:
            return "the weight is computed from something else"
        if weight.requires_grad and _has_hooks(weight):
            return "the weight has hooks, which are called by an ordinary backward"
        return None


def _parts(output: Any) -> LazyLogits:
    pair = isinstance(output, tuple) and len(output) == 2
    if not (pair and all(isinstance(part, Tensor) for part in output)):
        raise TypeError(
            "output must be LazyLogits, a (hidden, weight) pair, or logits, got a "
            f"{type(output).__name__}. LinearCrossEntropy takes them from the head"
        )
    return output  # type: ignore[no-any-return]


def _has_hooks(weight: Tensor) -> bool:
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return True
    # Hooks may also be on the node that adds to `.grad`. Adding a hook there shows the others.
    node = get_gradient_edge(weight).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        several = len(handle.hooks_dict_ref() or ()) > 1
        handle.remove()
        if several:
            return True
    return False


def _collected(weight: Tensor) -> Tensor:
    """The tensor that collects the gradients of a weight."""
    main = getattr(weight, "main_grad", None)
    if main is not None:
        if main.dtype != torch.float32 or main.shape != weight.shape:
            raise ValueError(
                f"main_grad of the head's weight must be float32 {tuple(weight.shape)}, got "
                f"{main.dtype} {tuple(main.shape)}"
            )
        return main  # type: ignore[no-any-return]
    if weight.grad is None:
        weight.grad = new_gradient(weight)
    return weight.grad


def new_gradient(parameter: Tensor) -> Tensor:
    """Zeros to add a parameter's gradients to, in the dtype that the parameter asks for."""
    # Later versions of torch have `grad_dtype`; None stands for any dtype.
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
