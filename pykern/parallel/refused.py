"""What a pipeline that trains together with other processes cannot have beside it."""

from __future__ import annotations

from torch import nn

from ..budget.budget import Budget


def refuse_budget(recompute: object) -> None:
    """Raises ValueError where slices of a microbatch would be measured, which wait for others."""
    if isinstance(recompute, Budget):
        raise ValueError(
            "recompute=Budget(...) with tensor_parallel: slices cannot be measured by one process "
            "alone; give levels, such as the `fitted` of a pipeline without slices"
        )


def refuse_main_grads(model: nn.Module) -> None:
    """Raises ValueError where a parameter collects gradients in another place than `.grad`."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"{name} has a main_grad, and sums over process_group are of .grad: leave it out"
            )
