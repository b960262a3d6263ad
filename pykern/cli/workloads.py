"""The model that a command runs: the demo's, or one that a user's function returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..script import ScriptFailed
from .errors import errors_of

if TYPE_CHECKING:
    from torch import nn

SEED = 0

ModelSource = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="Returns (model, inputs, target) or (model, inputs, target, loss_fn) of a batch.",
        show_default="a small GPT",
    ),
]


class Workload(NamedTuple):
    """A model and a batch for it.

    Attributes:
        model: as for `Pipeline`.
        inputs: arguments of the model: a tensor, a tuple, or a dict of keyword arguments.
        target: of the loss; None if the batch has no target.
        loss_fn: as for `Pipeline`.
    """

    model: nn.Module
    inputs: Any
    target: Any
    loss_fn: Callable[..., Any]

    def sample(self, num_microbatches: int) -> Any:
        """The inputs of the first microbatch, for a model with a forward of its own; else None.

        Raises:
            ValueError: the inputs have no rows to cut.
        """
        from ..partition.chain import call_of, is_chain
        from ..runtime import microbatch

        num_rows = microbatch.batch_size(call_of(self.inputs))
        if is_chain(self.model):
            return None
        return microbatch.split(self.inputs, microbatch.sizes(num_rows, num_microbatches))[0]


# Makes one for a number of stages, the same each time.
MakeWorkload = Callable[[int], Workload]


def require_source(source: str | None) -> None:
    """Refuses a source whose module is not there, which can be told without torch.

    Raises:
        ValueError: it is not "module:function", or there is no such module.
    """
    if source is None:
        return
    module_name, _ = _names(source)
    outermost = module_name.partition(".")[0]
    if find_spec(outermost) is None:
        raise _no_module(source, outermost)


def _no_module(source: str, name: str) -> ValueError:
    remedy = "Leave out .py" if name.endswith(".py") else "Run pykern in its folder"
    return ValueError(
        f"the model must be a function of a module, got '{source}': there is no module {name}. "
        f"{remedy}"
    )


def _names(source: str) -> tuple[str, str]:
    """The names of the module, which is looked for beside the user first, and of the function.

    Raises:
        ValueError: it is not "module:function", or the user's folder has been removed.
    """
    module_name, _, name = source.partition(":")
    if not all(map(str.isidentifier, [*module_name.split("."), name])):
        raise ValueError(f"the model must be module:function, got '{source}'")
    try:
        here = str(Path.cwd())
    except FileNotFoundError as error:
        raise ValueError(
            f"{module_name} must be looked for in a folder that exists, got a current folder that "
            "has been removed. Go to another folder"
        ) from error
    if here not in sys.path:
        sys.path.insert(0, here)
    return module_name, name


def workload_of(source: str | None) -> MakeWorkload:
    """A function that makes the model and its batch.

    Args:
        source: "module:function", looked for beside the user first; None for the demo's.

    Raises:
        ValueError: the module or the function does not exist.
    """
    if source is None:
        return _seeded(_demo)
    require_source(source)
    module_name, name = _names(source)
    try:
        with _users_code(module_name):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        # Another module may be missing, which this one imports.
        raise error if error.name != module_name else _no_module(source, module_name) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"the model must be a function of the module {module_name}, got '{name}', which is not "
            "there"
        )

    def returned(_: int) -> Workload:
        with _users_code(module_name):
            found = function()
        return _checked(source, found)

    return _seeded(returned)


@contextmanager
def _users_code(module_name: str) -> Iterator[None]:
    """Shows the errors of the user's module from its own line on, as those of a script."""
    spec = find_spec(module_name)
    with errors_of(str(spec and spec.origin)):
        try:
            yield
        except (ImportError, OSError, ValueError):
            raise
        except Exception as error:
            raise ScriptFailed from error


def _seeded(make: MakeWorkload) -> MakeWorkload:
    def seeded(num_stages: int) -> Workload:
        import torch

        torch.manual_seed(SEED)
        return make(num_stages)

    return seeded


def _checked(source: str, returned: Any) -> Workload:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from ..runtime.microbatch import batch_size

    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        raise ValueError(
            f"{source} must return (model, inputs, target) or (model, inputs, target, loss_fn), "
            f"got {type(returned).__name__}"
        )
    model, inputs, target, loss_fn = (*returned, _usual_loss)[:4]
    layers = model if isinstance(model, Sequence) else [model]
    if not all(isinstance(layer, nn.Module | ExportedProgram) for layer in layers):
        raise ValueError(
            f"{source} must return a model as for Pipeline first, got {type(model).__name__}. "
            "Return (model, inputs, target)"
        )
    if not callable(loss_fn):
        raise ValueError(
            f"{source} must return a function as loss_fn, got {type(loss_fn).__name__}. "
            "Return for example torch.nn.functional.mse_loss"
        )
    if loss_fn is _usual_loss and target is None:
        raise ValueError(
            f"{source} must return a target or a loss_fn, got neither. A loss_fn takes the output "
            "alone where there is no target"
        )
    if loss_fn is _usual_loss and not isinstance(target, Tensor):
        raise ValueError(
            f"{source} must return a tensor as target or a loss_fn, got a target of type "
            f"{type(target).__name__}. Return a loss_fn that takes it"
        )
    batch_size({"inputs": inputs, "target": target})
    return Workload(model, inputs, target, loss_fn)


def _usual_loss(output: Any, target: Any) -> Any:
    """Mean squares, or cross entropy for classes."""
    import torch.nn.functional as F

    return (
        F.mse_loss(output, target)
        if target.is_floating_point()
        else F.cross_entropy(output, target)
    )


def _demo(num_stages: int) -> Workload:
    """A minimal GPT with dropout."""
    import torch

    from ..models import gpt, next_token_loss

    layers = max(2, -(-num_stages // 2))
    model = gpt(layers=layers, width=32, heads=2, context=16, dropout=0.1, seed=SEED)
    ids = torch.randint(256, (19, 17))
    return Workload(model, ids[:, :-1], ids[:, 1:], next_token_loss)
