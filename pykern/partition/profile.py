"""Measures what each layer of a chain costs, on the CPU, without leaving a trace in the model.

It reports times and takes no decision: `partition` turns them into stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..modes import as_before, same_numbers
from ..tensors.parameters import with_values
from ..tensors.trees import all_tensors, flatten, map_tensors


def layer_times_ns(layers: Sequence[nn.Module], sample: Any, repeats: int = 5) -> list[int]:
    """Time forward plus backward of every layer, each fed with the output of the one before.

    Parameters, buffers, gradients, modes and the state of torch's random numbers are as before
    afterwards, whatever the layers do: each call runs on copies of the buffers and collects no
    gradient. It runs as in training: see `as_in_training`.

    Args:
        layers: The model as a chain of layers, on the CPU.
        sample: An input of the first layer: tensors, alone or nested, as large as one microbatch.
        repeats: Timed runs per layer, after one that is not timed.

    Returns:
        The median time of each layer, in nanoseconds.

    Raises:
        ValueError: If a layer or the sample is not on the CPU, where this clock would be wrong.
    """
    _check_on_cpu(layers, sample)
    times = []
    with same_numbers(), as_in_training(layers):
        for layer in layers:
            runs = [_run(layer, sample) for _ in range(1 + repeats)]
            times.append(round(median(elapsed for elapsed, _ in runs[1:])))
            sample = runs[-1][1]
    return times


def layer_bytes(layers: Sequence[nn.Module], sample: Any) -> list[int]:
    """Bytes that the forward of every layer keeps for its backward, without its parameters.

    Leaves no trace in the layers, as `layer_times_ns`.

    Args:
        layers: The model as a chain of layers, on the CPU.
        sample: An input of the first layer, as large as one microbatch.

    Raises:
        ValueError: If a layer or the sample is not on the CPU.
    """
    _check_on_cpu(layers, sample)
    found = []
    with same_numbers(), as_in_training(layers):
        for layer in layers:
            kept: dict[int, int] = {}
            held = {tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}

            def note(tensor: Tensor, kept: dict[int, int] = kept, held: set[int] = held) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in held:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, _same):
                _, sample = _run(layer, sample)
            found.append(sum(kept.values()))
    return found


@contextmanager
def as_in_training(models: Sequence[nn.Module]) -> Iterator[None]:
    """Within it gradients are on, and models that are in eval mode altogether are in training mode.

    A mix of modules in training mode and in eval mode is the user's choice, and stays.

    Args:
        models: Modules whose modes count, with all that is in them.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    with as_before(), torch.inference_mode(False), torch.enable_grad():
        try:
            if not any(was for _, was in modes):
                for model in models:
                    # Some modules have some of theirs stay as they are.
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
            raise ValueError(f"a tensor is on {tensor.device}; times are measured on the CPU only")


def _run(layer: nn.Module, sample: Any) -> tuple[int, Any]:
    """One forward and backward: nanoseconds, and the output as the next layer's sample."""
    state: dict[str, Tensor] = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    # A frozen one needs no gradient, and may be of a class that a copy would not have.
    trained = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    state |= {name: with_values(each, each.detach()) for name, each in trained.items()}
    leaves = map_tensors(_fresh_leaf, sample)
    # A layer may work in place, which autograd forbids on a leaf and the sample must not see.
    inputs = map_tensors(torch.clone, leaves)
    start = time.perf_counter_ns()
    output = functional_call(layer, state, (inputs,))
    results = [leaf for leaf in flatten(output)[0] if _wants_gradient(leaf)]
    sources = [leaf for leaf in [*state.values(), *flatten(leaves)[0]] if _wants_gradient(leaf)]
    if results and sources:
        ones = [torch.ones_like(result) for result in results]
        torch.autograd.grad(results, sources, ones, allow_unused=True)
    return time.perf_counter_ns() - start, output


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
