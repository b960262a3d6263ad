"""Comparisons of a pipeline's results with others, bit for bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

# Losses of some steps, and parameters after them by name.
Trained = tuple[Sequence[Tensor], Mapping[str, Tensor]]


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Parameters agree by name, and their gradients bit for bit; some may have none."""
    others = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(others)
    for name, parameter in ours.named_parameters():
        expected = others[name].grad
        if expected is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, expected), name


def assert_all_have_gradients(model: nn.Module) -> None:
    """No parameter is without a gradient."""
    assert all(parameter.grad is not None for parameter in model.parameters())


def assert_same_state(pipe: nn.Module, plain: nn.Module) -> None:
    """Gradients and buffers agree by name and bit for bit."""
    assert_same_gradients(pipe, plain)
    buffers = dict(plain.named_buffers())
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same tensor."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def assert_near_training(found: Sequence[Trained], expected: Trained, bound: float) -> None:
    """All have trained alike, and each number is as near what is expected as the bound."""
    for one in found:
        assert_same_training(one, found[0])
    for loss, other in zip(found[0][0], expected[0], strict=True):
        assert abs(loss - other) <= bound
    for name, value in found[0][1].items():
        assert (value - expected[1][name]).abs().max() <= bound


def assert_same_training(found: Trained, expected: Trained) -> None:
    """The losses of all steps, and the parameters after the last."""
    assert len(found[0]) == len(expected[0])
    assert all(map(torch.equal, found[0], expected[0]))
    assert_same_tensors(found[1], expected[1])
