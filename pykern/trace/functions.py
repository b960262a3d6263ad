"""Facts about torch's functions, by their names."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private import is_transformed
from ..user_code import user_line
from .errors import CutError

# Functions that tell of a tensor without looking at its values.
METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point
    is_complex is_signed is_inference is_conj is_neg element_size get_device type data_ptr
    __len__ untyped_storage is_same_size is_set_to is_pinned is_shared is_coalesced has_names
    _is_view can_cast result_type dense_dim sparse_dim is_distributed broadcast_shapes
    retain_grad requires_grad_ __repr__
    __format__ __str__ __hash__ __dir__ is_tensor get_default_dtype
    """.split()  # noqa: SIM905
)
# Those among them that depend on shapes.
SHAPES = frozenset(("size", "numel", "nelement", "stride", "__len__", "shape", "nbytes"))
# Functions that draw random numbers.
RANDOM = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_
    multinomial normal normal_ uniform_ random_ dropout alpha_dropout feature_dropout dropout_
    dropout1d dropout2d dropout3d feature_alpha_dropout rrelu poisson exponential_ geometric_
    log_normal_ cauchy_ gumbel_softmax scaled_dot_product_attention native_dropout
    """.split()  # noqa: SIM905
)

# Functions that run a backward, and methods that register hooks for a backward.
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))


def name_of(function: Any) -> str:
    """The name of a function; for the reading of a tensor's property, the property's name."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


def refuse_transforms(name: str) -> None:
    """Refuses calls within torch.vmap and the like, which have tensors of their own."""
    if is_transformed():
        raise CutError(
            f"{user_line()} calls {name} within a transform of torch.func, such as torch.vmap, "
            "which cannot be cut. Keep a module around the transform whole (whole=[...])"
        )


def refuse_autograd(function: Any, name: str) -> None:
    """Refuses what looks at, or changes, a graph that stages cut."""
    refuse_transforms(name)
    whole = "within a module that stays whole (whole=[...])"
    if function in _BACKWARDS:
        raise CutError(
            f"{user_line()} runs a backward (torch.autograd) in the forward, through a graph that "
            f"stages cut. Keep the whole computation {whole}, or do it in loss_fn"
        )
    if name in _HOOKS:
        raise CutError(
            f"{user_line()} registers a hook for a gradient ({name}), which would not be repeated "
            f"for each microbatch. Do it {whole}, or write an autograd function"
        )
