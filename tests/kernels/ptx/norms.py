"""Norms and dropout as operations to execute."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pykern.kernels import dropout as dropout_twin
from pykern.kernels.gpu import dropout
from pykern.kernels.gpu import norm_operation as norm
from tests.kernels.norm_cases import EPS, SEED, Exact, exact_sum
from tests.kernels.ptx.outcome import Given, Operation, Outcome

_RATE = 0.25
# Rows of that many hidden columns are read in parts.
_LONG = 5


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _cut(given: Given, times: int) -> Given:
    """Long rows are two."""
    rows = min(given.shape.rows, 2) if times > 1 else given.shape.rows
    return Given(given.shape._replace(rows=rows), given.dtype)


def _forward(given: Given, *, centred: bool, adds: bool, times: int = 1) -> Outcome:
    given = _cut(given, times)
    columns = given.shape.hidden * times
    x, weight = given.rows(columns, scale=2), given.row(columns)
    delta = given.rows(columns) if adds else None
    bias = given.row(columns) if centred else None
    rate = _RATE if adds else 0.0
    added, normed, rstd, mean = norm.add_and_normalise(
        x, delta, weight, bias, EPS, centred, given.dtype, rate, SEED, None
    )
    outcome = Outcome(_present(x, delta, weight, bias))
    if delta is not None:
        outcome.near(added, *exact_sum(x, delta, rate))
        kept = dropout_twin.keeps(delta, rate, SEED, None)
        untouched = added == x
        assert torch.equal(untouched | kept, torch.ones_like(kept)), "a dropped term is there"
    exact = Exact(x if delta is None else added, weight, bias, centred)
    outcome.near(normed, *exact.normed(), 10)
    outcome.near(rstd, exact.rstd, exact.rstd, 16)
    if centred:
        size = exact.x.abs().mean(-1, keepdim=True)
        outcome.near(mean, exact.mean, size)
    return outcome


def _backward(given: Given, *, centred: bool, adds: bool, times: int = 1) -> Outcome:
    given = _cut(given, times)
    columns = given.shape.hidden * times
    total, weight = given.rows(columns, scale=2), given.row(columns)
    gradient, residual = given.rows(columns), given.rows(columns) if adds else None
    bias = given.row(columns) if centred else None
    exact = Exact(total, weight, bias, centred)
    rstd, mean = exact.rstd.float(), exact.mean.float() if centred else torch.zeros(0)
    of_total, again, of_weights = norm.gradients(
        gradient, residual, total, weight, bias, rstd, mean, EPS, centred, adds
    )
    outcome = Outcome(_present(gradient, residual, total, weight, bias, rstd, mean))
    outcome.near(of_total, *exact.of_total(gradient, residual), 20)
    outcome.near(of_weights, *exact.of_weights(gradient), 20)
    if adds:
        outcome.near(again, *exact.normed(), 10)
    return outcome


def _remade(given: Given, *, centred: bool) -> Outcome:
    """The backward makes the normed output again, bit for bit."""
    columns = given.shape.hidden
    x, weight, gradient = given.rows(columns), given.row(columns), given.rows(columns)
    bias = given.row(columns) if centred else None
    _, normed, rstd, mean = norm.add_and_normalise(
        x, None, weight, bias, EPS, centred, given.dtype, 0.0, 0, None
    )
    _, again, _ = norm.gradients(gradient, None, x, weight, bias, rstd, mean, EPS, centred, True)
    outcome = Outcome(_present(x, gradient, weight, bias))
    outcome.same(again, normed)
    return outcome


def _dropout(given: Given, *, in_memory: bool) -> Outcome:
    x = given.rows(given.shape.hidden)
    place = torch.tensor([SEED]) if in_memory else None
    result = dropout.masked(x, _RATE, 0 if in_memory else SEED, place)
    outcome = Outcome([x])
    outcome.same(result, dropout_twin.masked(x, _RATE, SEED, None))
    return outcome


OPERATIONS: dict[str, Operation] = {
    "rms_norm": partial(_forward, centred=False, adds=False),
    "add + dropout + rms_norm": partial(_forward, centred=False, adds=True),
    "layer_norm": partial(_forward, centred=True, adds=False),
    "add + dropout + layer_norm": partial(_forward, centred=True, adds=True),
    "rms_norm of long rows": partial(_forward, centred=False, adds=True, times=_LONG),
    "layer_norm of long rows": partial(_forward, centred=True, adds=False, times=_LONG),
    "rms_norm backward": partial(_backward, centred=False, adds=False),
    "rms_norm backward, normed again": partial(_backward, centred=False, adds=True),
    "layer_norm backward": partial(_backward, centred=True, adds=False),
    "layer_norm backward, normed again": partial(_backward, centred=True, adds=True),
    "rms_norm backward of long rows": partial(_backward, centred=False, adds=True, times=_LONG),
    "layer_norm backward of long rows": partial(_backward, centred=True, adds=False, times=_LONG),
    "rms_norm, made again": partial(_remade, centred=False),
    "layer_norm, made again": partial(_remade, centred=True),
    "dropout": partial(_dropout, in_memory=False),
    "dropout, seed in memory": partial(_dropout, in_memory=True),
}
