"""Whether what is to be saved or loaded is a model and an optimizer."""

from torch import nn


def require_kinds(model: object, optimizer: object) -> None:
    """Refuses anything but a model, and an optimizer or None.

    Raises:
        TypeError: one of them is something else.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {_shown(model)}. Give the model itself, whose "
            "state_dict() is taken here"
        )
    # Wrappers of optimizers, such as those of Accelerate, need not be of torch's class.
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer must be an optimizer of torch.optim or like one, got {_shown(optimizer)}. "
            "Give a scheduler by scheduler=, and a scaler by scaler="
        )


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of {type(value).__name__}"
