"""Cross entropy and the 8-bit stash as operations to execute."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.kernels import stash as stash_twin
from pykern.kernels.gpu import cross_entropy, stash
from pykern.kernels.stash import StashForm
from tests.kernels.ptx.outcome import Given, Operation, Outcome

_IGNORED = -100
_SCALE = 0.37


def _targets(num_rows: int, num_classes: int) -> Tensor:
    """One row is ignored; another has the last class."""
    target = torch.randint(num_classes, (num_rows,))
    target[:1], target[1:2] = num_classes - 1, _IGNORED
    return target


def _cross_entropy(given: Given, *, losses_too: bool, gradients: bool) -> Outcome:
    classes, num_rows = given.shape.classes, min(given.shape.rows, 2)
    # Columns of padding have NaN. Llama's rows stay aligned.
    padding = 3 if classes % 128 else 16
    logits = given.rows(classes + padding, num_rows, scale=3)
    logits[:, classes:] = float("nan")
    values, target = logits[:, :classes].double(), _targets(num_rows, classes)
    sums, scale = values.logsumexp(1), torch.tensor(_SCALE)
    outcome = Outcome([logits, target])
    counts = target != _IGNORED
    one = F.one_hot(target.clamp(min=0), classes) * counts[:, None]
    roundings = 1 + sums.abs() + (values.abs().amax(1) if num_rows else sums)
    if losses_too:
        losses, log_sums = cross_entropy.losses_of_rows(
            logits, target, scale if gradients else None, classes, _IGNORED
        )
        own = (values * one).sum(1)
        outcome.near(log_sums, sums, roundings)
        outcome.near(losses, (sums - own) * counts, roundings + own.abs())
    else:
        outcome.inputs.append(log_sums := sums.float())
        cross_entropy.gradients_of_rows(logits, log_sums, target, scale, classes, _IGNORED)
    if gradients:
        softmax = (values - sums[:, None]).exp() * counts[:, None]
        terms = (softmax * (roundings[:, None] + values.abs()) + one) * _SCALE
        outcome.near(logits[:, :classes], (softmax - one) * _SCALE, terms)
        assert not logits[:, classes:].any(), "padding has gradients"
    return outcome


def _quantised(given: Given, *, form: StashForm) -> Outcome:
    x = given.rows(given.shape.inner)
    x[:1, :1] = float("inf")
    x[1:2, :256] = 0
    outcome = Outcome([x])
    codes, scales = stash.quantised(x, form)
    outcome.same(scales, stash_twin.quantised(x, form)[1])
    outcome.outputs.append(codes)
    # A compiled kernel fuses operations, so codes may differ from the twin's where two are as near.
    steps = scales.double().repeat_interleave(stash_twin.BLOCK, -1)[:, : x.shape[-1]]
    whole = ~steps.isnan()
    back = codes.double() * steps
    if form == "e4m3":
        # Three bits of mantissa; below the smallest normal number, steps of 2**-9.
        inside = (x.double() / steps).abs().nan_to_num(1).clamp(min=2.0**-6)
        steps = steps * torch.exp2(inside.log2().floor() - 3)
    assert ((back - x.double()).abs() <= 0.501 * steps)[whole].all(), "off by over half a step"
    return outcome


def _restored(given: Given, *, form: StashForm) -> Outcome:
    codes, scales = stash_twin.quantised(given.rows(given.shape.inner), form)
    outcome = Outcome([codes, scales])
    outcome.same(
        stash.restored(codes, scales, given.dtype),
        stash_twin.restored(codes, scales, given.dtype),
    )
    return outcome


OPERATIONS: dict[str, Operation] = {
    "cross entropy": partial(_cross_entropy, losses_too=True, gradients=False),
    "cross entropy with gradients": partial(_cross_entropy, losses_too=True, gradients=True),
    "cross entropy gradients": partial(_cross_entropy, losses_too=False, gradients=True),
    "quantise int8": partial(_quantised, form="int8"),
    "restore int8": partial(_restored, form="int8"),
    "quantise e4m3": partial(_quantised, form="e4m3"),
    "restore e4m3": partial(_restored, form="e4m3"),
}
