"""Measures what each layer of a chain costs, on the CPU, without leaving a trace in the model.

It reports times and takes no decision: `partition` turns them into stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..modes import as_before
from ..tensors.parameters import num_bytes, with_values
from ..tensors.sparse import dense_parts
from ..tensors.trees import all_tensors, flatten, map_tensors
from ..trace.kept_state import KeptState
from ..trace.origins import storages_of
from ..user_code import warn

# The number of rounds. A round times each layer once.
FEWEST_ROUNDS = 6
MOST_ROUNDS = 40
# Two halves of the rounds agree when their times differ by no more than this share.
TOLERANCE = 0.05
# The weight of a parameter that trains, its gradient, and two moments of Adam.
_COPIES = 4


class FirstArguments(NamedTuple):
    """Arguments of the first layer, in the place of a sample: a tuple there is one argument."""

    of_layer: tuple[Any, ...]


def costs_of_layers(
    balance: str, layers: list[nn.Module], parameters: list[int], sample: Any, num_stages: int
) -> list[int]:
    """The cost of every layer, as integers so that the cut is exact."""
    if balance == "time":
        return layer_times_ns(layers, sample)
    if balance == "memory":
        return bytes_held(layers, sample, num_stages)
    return parameters if balance == "parameters" else [1] * len(layers)


def bytes_held(layers: Sequence[nn.Module], sample: Any, num_stages: int) -> list[int]:
    """The bytes of each layer, with the activations of as many microbatches as stages."""
    kept = layer_bytes(layers, sample)
    return [_bytes_of(one) + num_stages * of for one, of in zip(layers, kept, strict=True)]


def _bytes_of(layer: nn.Module) -> int:
    held = sum(num_bytes(buffer) for buffer in layer.buffers())
    return held + sum(
        num_bytes(parameter) * (_COPIES if parameter.requires_grad else 1)
        for parameter in layer.parameters()
    )


def layer_times_ns(layers: Sequence[nn.Module], sample: Any) -> list[int]:
    """Time forward plus backward of every layer, each fed with the output of the one before.

    Parameters, buffers, attributes, gradients, modes and random numbers are as before afterwards,
    whatever the layers do: each call runs on copies of the buffers and collects no gradient. It
    runs as in training: see `as_in_training`.

    Args:
        layers: The model as a chain of layers, on the CPU.
        sample: An input of the first layer: tensors, alone or nested, as large as one microbatch;
            or `FirstArguments`.

    Returns:
        The median time of each layer, in nanoseconds. All layers run in turn, round after round,
        so that what slows the machine for a while slows all of them, until the two halves of the
        rounds agree; a warning says so where they do not.

    Raises:
        ValueError: If a layer or the sample is not on the CPU, where this clock would be wrong.
    """
    samples = [_arguments(sample)]
    _check_on_cpu(layers, samples)
    rounds: list[list[int]] = []
    with kept_state(layers), as_in_training(layers):
        for layer in layers:
            samples.append((_run(layer, samples[-1])[1],))
        while len(rounds) < FEWEST_ROUNDS or (
            len(rounds) < MOST_ROUNDS and disagreement(rounds) > TOLERANCE
        ):
            rounds += [
                [_run(layer, of_layer)[0] for layer, of_layer in zip(layers, samples, strict=False)]
                for _ in range(2)
            ]
    if (apart := disagreement(rounds)) > TOLERANCE:
        # Filters of users begin with the message, and a filter of `-W` has no place for a colon.
        warn(
            f"the times of layers differ by {apart:.0%} between two halves of {len(rounds)} "
            "rounds; another cut may be as good. Measure on a machine that does nothing else.",
            prefix="",
        )
    return [round(each) for each in _medians(rounds)]


def disagreement(rounds: Sequence[Sequence[float]]) -> float:
    """The difference, as a share, between the layers' times in even and in odd rounds."""
    first, second = _medians(rounds[::2]), _medians(rounds[1::2])
    apart = sum(abs(one - other) for one, other in zip(first, second, strict=True))
    return 2 * apart / max(sum(first) + sum(second), 1)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [median(of_layer) for of_layer in zip(*rounds, strict=True)]


def layer_bytes(layers: Sequence[nn.Module], sample: Any) -> list[int]:
    """Bytes that the forward of every layer keeps for its backward, without its own tensors.

    Its parameters, buffers and tensors in attributes are there once, for all microbatches.

    Leaves no trace in the layers, as `layer_times_ns`.

    Args:
        layers: The model as a chain of layers, on the CPU.
        sample: An input of the first layer, as large as one microbatch.

    Raises:
        ValueError: If a layer or the sample is not on the CPU.
    """
    arguments = _arguments(sample)
    _check_on_cpu(layers, arguments)
    found = []
    with kept_state(layers), as_in_training(layers):
        for layer in layers:
            kept: dict[int, int] = {}
            state = _state_of(layer)
            held = {each._cdata for each in storages_of(list(_own_tensors(layer, state)))}

            def note(tensor: Tensor, kept: dict[int, int] = kept, held: set[int] = held) -> Tensor:
                # Fake tensors have no addresses.
                for part in dense_parts(tensor):
                    storage = part.untyped_storage()
                    if storage._cdata not in held:
                        kept[storage._cdata] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, _same):
                arguments = (_run(layer, arguments, state)[1],)
            found.append(sum(kept.values()))
    return found


def kept_state(models: Sequence[nn.Module]) -> AbstractContextManager[object]:
    """A context, behind which models, or layers, have the state that they had."""
    return KeptState({each: None for model in models for each in model.modules()}).kept()


@contextmanager
def as_in_training(models: Sequence[nn.Module]) -> Iterator[None]:
    """A context with gradients on, and with models that are wholly in eval mode in training mode.

    A mix of modules in training mode and in eval mode is the user's choice, and stays.

    Args:
        models: Modules whose modes count, with all that is in them.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    with as_before(), torch.inference_mode(False), torch.enable_grad():
        try:
            if not any(was for _, was in modes):
                for model in models:
                    # Modules may override `train`, and keep some submodules in eval mode.
                    model.train()
            yield
        finally:
            for module, was in modes:
                module.training = was


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_on_cpu(layers: Sequence[nn.Module], sample: Any) -> None:
    tensors = all_tensors(sample)
    for layer in layers:
        tensors += [*layer.parameters(), *layer.buffers()]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"tensors must be on the CPU for times to be measured, got one on {tensor.device}. "
                "Give balance=[...], or use pipe.costs() on GPUs"
            )


def _state_of(layer: nn.Module) -> dict[str, Tensor]:
    """Copies of buffers, and parameters with gradients of their own, for one run."""
    state: dict[str, Tensor] = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    # A frozen one needs no gradient, and may be of a class that a copy would not have.
    trained = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    return state | {name: with_values(each, each.detach()) for name, each in trained.items()}


def _own_tensors(layer: nn.Module, state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The tensors that a layer holds between its runs, and those in their places in a run."""
    attributes = (value for module in layer.modules() for value in vars(module).values())
    for each in chain(state.values(), layer.parameters(), attributes):
        if isinstance(each, Tensor):
            yield from dense_parts(each)


def _arguments(sample: Any) -> tuple[Any, ...]:
    return sample.of_layer if isinstance(sample, FirstArguments) else (sample,)


def _run(
    layer: nn.Module, arguments: tuple[Any, ...], state: Mapping[str, Tensor] | None = None
) -> tuple[int, Any]:
    """One forward and backward: nanoseconds, and the output as the next layer's argument."""
    state = dict(state or _state_of(layer))
    leaves = map_tensors(_fresh_leaf, arguments)
    # A layer may work in place, which autograd forbids on a leaf and the sample must not see.
    inputs = map_tensors(torch.clone, leaves)
    start = time.perf_counter_ns()
    output = functional_call(layer, state, inputs)
    results = [leaf for leaf in flatten(output)[0] if _wants_gradient(leaf)]
    sources = [leaf for leaf in [*state.values(), *flatten(leaves)[0]] if _wants_gradient(leaf)]
    if results and sources:
        torch.autograd.grad(results, sources, list(map(_start, results)), allow_unused=True)
    return time.perf_counter_ns() - start, output


def _start(result: Tensor) -> Tensor:
    """A gradient of the result, whose values do not matter; torch makes no sparse ones."""
    return torch.ones_like(result) if result.layout is torch.strided else result.detach()


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
