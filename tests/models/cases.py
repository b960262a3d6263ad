"""The models, small, with losses, batches and what is asked of any of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pykern.kernels.head_loss import LinearCrossEntropy
from pykern.models import bert, gpt, llama, moe, next_token_loss, with_balance

VOCAB = 19
LENGTH = 12

_SIZES: dict[str, Any] = {"vocab": VOCAB, "layers": 2, "width": 16, "heads": 4}
_LLAMA = _SIZES | {"kv_heads": 2, "hidden": 24}

MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "gpt": lambda **more: gpt(**_SIZES, context=LENGTH, **more),
    "gpt tied": lambda **more: gpt(**_SIZES, context=LENGTH, tied=True, **more),
    "llama": lambda **more: llama(**_LLAMA, **more),
    "bert": lambda **more: bert(**_SIZES, context=LENGTH, **more),
    "moe": lambda **more: moe(**_LLAMA, num_experts=4, num_chosen=2, **more),
}
# Those with a rate of dropout.
WITH_DROPOUT = {"gpt", "gpt tied", "bert"}


@dataclass
class Case:
    """A model, its loss, and a batch for it."""

    model: nn.Sequential
    loss_fn: Callable[[Any, Tensor], Tensor]
    ids: Tensor
    target: Tensor


def case(name: str, rows: int = 3, *, fused_loss: bool = False, dropout: float = 0.0) -> Case:
    """The case of a model by its name, with dropout where it has a rate.

    Sequences for BERT end in padding, of which no loss is taken.
    """
    rates = {"dropout": dropout} if name in WITH_DROPOUT else {}
    model = MODELS[name](fused_loss=fused_loss, **rates)
    loss_fn = LinearCrossEntropy() if fused_loss else next_token_loss
    ids = torch.randint(1, VOCAB, (rows, LENGTH))
    target = torch.randint(1, VOCAB, (rows, LENGTH))
    if name == "bert":
        for row in range(rows):
            ids[row, LENGTH - row % 4 :] = 0
        target[ids == 0] = -100
    return Case(model, with_balance(loss_fn) if name == "moe" else loss_fn, ids, target)


def answer(of: Case, model: nn.Sequential) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a model on the batch of a case."""
    model.zero_grad()
    loss = of.loss_fn(model(of.ids), of.target)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return loss.detach(), gradients
