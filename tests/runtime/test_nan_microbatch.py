"""A microbatch whose labels are all ignored makes the loss NaN, and its user is told why."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern


def step(loss_fn: Callable[..., Tensor], labels: Tensor, reduction: str = "mean") -> Tensor:
    """The loss of four microbatches, of which the first has the first two of eight labels."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 4)]
    options = {"devices": "cpu:2", "microbatches": 4, "reduction": reduction}
    with pykern.Pipeline(layers, loss_fn=loss_fn, **options) as pipe:  # type: ignore[arg-type]
        return pipe.step(torch.randn(8, 3), target=labels)


def test_a_microbatch_of_ignored_labels_is_told_of_with_the_remedy() -> None:
    labels = torch.tensor([-100, -100, 1, 2, 3, 0, 1, 2])
    with pytest.warns(UserWarning, match="NaN, from microbatch 0 of 4.*reduction='sum'") as told:
        assert step(F.cross_entropy, labels).isnan()
    assert [each.filename for each in told] == [__file__]

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / 6

    assert step(mean, labels, "sum").isfinite()


def test_a_loss_that_is_nan_everywhere_is_no_sign_of_ignored_labels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(F.cross_entropy, torch.full((8,), -100)).isnan()
