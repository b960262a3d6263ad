"""The plain model run microbatch by microbatch, for any model, and what becomes of it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.plain_step import by_microbatch, rows_of

from .case import Case


class Plain:
    """The model of a case, run microbatch by microbatch.

    Each stage has parameters of its own, with the values of the model's. Gradients that several
    stages have collected for a parameter are added when a step has ended, in ascending order of
    stages.

    Args:
        case: whose model is run.
        num_microbatches: how many parts the batch has.
        starts: the names of the modules that stages begin with, as `Partition.layer_names` has
            them. There the random numbers of the next stage begin.
        num_replicas: which take turns with the microbatches.
    """

    def __init__(
        self, case: Case, num_microbatches: int, starts: Sequence[str], num_replicas: int
    ) -> None:
        self._case = case
        self._rows = rows_of(case.rows, num_microbatches)
        self._parts = _parts((case.args, case.kwargs, case.target), self._rows)
        self._num_replicas = num_replicas
        self._stages = _Stages(case.model, starts)
        self._originals = list(case.model.parameters())
        number = {parameter: number for number, parameter in enumerate(self._originals)}
        self._places = [
            (module, name, number[parameter])
            for module in case.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self._own = [
            nn.ParameterList(nn.Parameter(p.detach(), p.requires_grad) for p in self._originals)
            for _ in starts or [""]
        ]
        self._draws = False

    def step(self) -> Tensor:
        """Loss of the batch; gradients are added to `.grad`."""
        loss = by_microbatch(
            nn.ModuleList(self._own), self._rows, self._loss_of, self._num_replicas
        )
        self._use(self._originals)
        for number, original in enumerate(self._originals):
            found = [own[number] for own in self._own if own[number].grad is not None]
            for other in found[1:]:
                found[0].grad += other.grad
                other.grad = None
            original.grad = found[0].grad if found else None
        assert self._draws == self._case.draws
        if self._draws:
            # The step takes one of the caller's random numbers.
            torch.empty((), dtype=torch.int64).random_()
        return loss

    def _loss_of(self, index: int, seed: Callable[[int], object]) -> Tensor:
        args, kwargs, target = self._parts[index]
        state = torch.get_rng_state()

        def begin(stage: int) -> None:
            nonlocal state
            self._draws = self._draws or not torch.equal(state, torch.get_rng_state())
            seed(stage)
            state = torch.get_rng_state()
            self._use(self._own[stage])

        with self._stages.announced(begin):
            begin(0)
            output = call(self._case.model, args, kwargs)
        loss_fn = self._case.loss_fn
        loss = loss_fn(output) if target is None else loss_fn(output, target)
        self._draws = self._draws or not torch.equal(state, torch.get_rng_state())
        return loss

    def _use(self, parameters: Any) -> None:
        for module, name, number in self._places:
            setattr(module, name, parameters[number])


def call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls it; the layers of a chain are given what they name."""
    if not kwargs or not isinstance(model, nn.Sequential):
        return model(*args, **kwargs)
    for layer in model:
        named = {
            name: kwargs[name] for name in kwargs if name in signature(layer.forward).parameters
        }
        args = (layer(*args, **named),)
    return args[0]


def plain_forward(case: Case, num_microbatches: int) -> Any:
    """The plain model's output for the whole batch, put together from the microbatches."""
    rows = rows_of(case.rows, num_microbatches)
    parts = _parts((case.args, case.kwargs), rows)
    with torch.no_grad():
        outputs = [pytree.tree_flatten(call(case.model, args, kwargs)) for args, kwargs in parts]
    columns = zip(*(leaves for leaves, _ in outputs), strict=True)
    return pytree.tree_unflatten([_joined(column, rows) for column in columns], outputs[0][1])


def loss_of_parts(case: Case, output: Any, num_microbatches: int) -> Tensor:
    """The loss of a batch's output, as a step combines those of the microbatches."""
    rows = rows_of(case.rows, num_microbatches)
    leaves = pytree.tree_flatten(output)[0]
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves):
        # The model computes it, and the pipeline has combined it.
        return case.loss_fn(output)
    total = torch.zeros(())
    for (part, target), n in zip(_parts((output, case.target), rows), rows, strict=True):
        loss = case.loss_fn(part) if target is None else case.loss_fn(part, target)
        total = total + loss * (n / case.rows)
    return total


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
    terms = [value * (n / sum(rows)) for value, n in zip(column, rows, strict=True)]
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


class _Stages:
    """Where in a model its stages begin.

    Args:
        model: which.
        starts: what each stage begins with: names of modules, with the number of the call where it
            is not the first, as in "layers.3 (2)".
    """

    def __init__(self, model: nn.Module, starts: Sequence[str]) -> None:
        self._stage_of = {name: stage for stage, name in enumerate(starts) if stage > 0}
        names = {start.partition(" ")[0] for start in self._stage_of}
        self._modules = {name: model.get_submodule(name) for name in names}

    @contextmanager
    def announced(self, begin: Callable[[int], None]) -> Iterator[None]:
        """Within it, `begin` is called for each stage but the first."""
        calls: Counter[str] = Counter()

        def hook(name: str, *_: object) -> None:
            calls[name] += 1
            call = name if calls[name] == 1 else f"{name} ({calls[name]})"
            if call in self._stage_of:
                begin(self._stage_of[call])

        handles = [
            module.register_forward_pre_hook(partial(hook, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
