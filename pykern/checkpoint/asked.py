"""Whether what is to be saved or loaded is a model, an optimizer and the like."""

from torch import nn


def require_kinds(model: object, optimizer: object, **others: object) -> None:
    """Refuses anything but a model, an optimizer or None, and others with a state or None.

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
    for name, value in others.items():
        if value is not None and (isinstance(value, type) or not hasattr(value, "state_dict")):
            raise TypeError(
                f"{name} must have a state_dict(), got {_shown(value)}. Give the {name} itself"
            )


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of {type(value).__name__}"
