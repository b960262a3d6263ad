"""The plain model run microbatch by microbatch, for any model, and what becomes of it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.runtime.reference import by_microbatch, rows_of

from .case import ROWS, Case


def plain_step(
    case: Case, num_microbatches: int, starts: Sequence[str], num_replicas: int = 1
) -> Tensor:
    """Loss of the batch; gradients are added to `.grad`.

    Args:
        case: whose model is run.
        num_microbatches: how many parts the batch has.
        starts: the names of the modules that stages begin with, as `Partition.layer_names` has
            them. There the random numbers of the next stage begin.
        num_replicas: which take turns with the microbatches.
    """
    rows = rows_of(ROWS, num_microbatches)
    parts = _parts((case.args, case.kwargs, case.target), rows)
    drawn = _Drawn()

    def loss_of(index: int, seed: Callable[[int], object]) -> Tensor:
        args, kwargs, target = parts[index]
        with drawn.watched(seed) as begin, _at(case.model, starts, begin):
            output = case.model(*args, **kwargs)
            return case.loss_fn(output) if target is None else case.loss_fn(output, target)

    loss = by_microbatch(case.model, rows, loss_of, num_replicas)
    assert drawn.any == case.draws
    if case.draws:
        # Of the caller's random numbers the step takes one.
        torch.empty((), dtype=torch.int64).random_()
    return loss


def plain_forward(case: Case, num_microbatches: int) -> Any:
    """What the plain model returns for the whole batch, put together from the microbatches."""
    rows = rows_of(ROWS, num_microbatches)
    parts = _parts((case.args, case.kwargs), rows)
    with torch.no_grad():
        outputs = [pytree.tree_flatten(case.model(*args, **kwargs)) for args, kwargs in parts]
    columns = zip(*(leaves for leaves, _ in outputs), strict=True)
    return pytree.tree_unflatten([_joined(column, rows) for column in columns], outputs[0][1])


def equal(one: Any, other: Any) -> bool:
    """Whether two trees are equal, their tensors bit for bit."""
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(map(_same, leaves, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _joined(column: Sequence[Any], rows: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim() > 0:
        return torch.cat(list(column))
    terms = [value * (n / ROWS) for value, n in zip(column, rows, strict=True)]
    return sum(terms[1:], terms[0])


def _parts(tree: Any, rows: Sequence[int]) -> list[Any]:
    leaves, spec = pytree.tree_flatten(tree)
    columns = [
        leaf.split(list(rows)) if isinstance(leaf, Tensor) else [leaf] * len(rows)
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([column[index] for column in columns], spec)
        for index in range(len(rows))
    ]


@contextmanager
def _at(model: nn.Module, starts: Sequence[str], begin: Callable[[int], None]) -> Iterator[None]:
    """Within it, calls that stages begin with are preceded by `begin`."""
    stage_of = {name: stage for stage, name in enumerate(starts) if stage > 0}
    calls: Counter[str] = Counter()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1
            call = name if calls[name] == 1 else f"{name} ({calls[name]})"
            if call in stage_of:
                begin(stage_of[call])

        return hook

    modules = dict(model.named_modules())
    names = {start.partition(" ")[0] for start in stage_of}
    handles = [
        modules[name].register_forward_pre_hook(hook_of(name)) for name in names & modules.keys()
    ]
    begin(0)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Drawn:
    """Whether a model has drawn random numbers."""

    def __init__(self) -> None:
        self.any = False

    @contextmanager
    def watched(self, seed: Callable[[int], object]) -> Iterator[Callable[[int], None]]:
        """Gives the function that begins a stage."""
        state = torch.get_rng_state()

        def look() -> None:
            self.any = self.any or not torch.equal(state, torch.get_rng_state())

        def begin(stage: int) -> None:
            nonlocal state
            look()
            seed(stage)
            state = torch.get_rng_state()

        yield begin
        look()
