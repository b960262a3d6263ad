"""Comparisons of a pipeline's results with others, bit for bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

# Losses of some steps, and parameters after them by name.
Trained = tuple[Sequence[Tensor], Mapping[str, Tensor]]


def assert_same_state(pipe: nn.Module, plain: nn.Module) -> None:
    """Parameters, gradients and buffers agree by name and bit for bit."""
    theirs = dict(plain.named_parameters())
    ours = dict(pipe.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        expected = theirs[name].grad
        if expected is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, expected), name
    buffers = dict(plain.named_buffers())
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same tensor."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def assert_same_training(found: Trained, expected: Trained) -> None:
    """The losses of all steps, and the parameters after the last."""
    assert len(found[0]) == len(expected[0])
    assert all(map(torch.equal, found[0], expected[0]))
    assert_same_tensors(found[1], expected[1])
