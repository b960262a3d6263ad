"""What a pipeline that trains together with other processes cannot have beside it."""

from __future__ import annotations

from torch import nn

from ..budget import Budget
from ..partition import Balance


def refuse_measured(balance: Balance | None, recompute: object, joined: bool) -> None:
    """Raises ValueError where each of several processes would find something else by measuring."""
    if not joined:
        return
    measured = "each process would measure other times, and might choose otherwise"
    if balance == "time":
        raise ValueError(
            f'balance="time" beside other processes: {measured}; give what it finds in one process '
            "as numbers of layers, balance=[...]"
        )
    if isinstance(recompute, Budget):
        raise ValueError(
            f"recompute=Budget(...) beside other processes: {measured}; give levels, such as the "
            "`fitted` of a pipeline in one process"
        )


def refuse_main_grads(model: nn.Module) -> None:
    """Raises ValueError where a parameter collects gradients in another place than `.grad`."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"{name} has a main_grad, and sums over process_group are of .grad: leave it out"
            )
