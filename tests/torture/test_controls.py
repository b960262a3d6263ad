"""Each campaign sees what is broken: a campaign that nothing fails shows nothing."""

import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.plan import PlanError
from pykern.runtime.stage.ties import Ties
from tests.diagonal import nightly
from tests.runtime.test_faults import Fuse
from tests.zoo.case import Case
from tests.zoo.many import check as many
from tests.zoo.many.loss import mean_of_squares

from . import exits, faults, files, limits, lines, models, plans, runs, sigint_child, sigints
from .campaign import Campaign, run


def failures(campaign: Campaign, cases: int, seed: int = 1) -> str:
    """The messages of all failed cases in one text."""
    return "\n".join(run(campaign, seed, cases=cases).failures.values())


def test_a_check_that_accepts_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "check", lambda plan: None)
    assert "AssertionError" in failures(plans.CAMPAIGN, 5)


def test_a_check_that_accepts_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PlanError("P007 (free of deadlock)")
    error.rule, error.device, error.position = "P007", 0, 0

    def refuse(plan: object) -> None:
        raise error

    monkeypatch.setattr(plans, "check", refuse)
    assert "P007" in failures(plans.CAMPAIGN, 2)


def test_an_order_of_sums_that_is_not_the_plans_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = runs._add

    def backwards(parameter: nn.Parameter, terms: list[Tensor], *, whole: bool) -> None:
        add(parameter, terms[::-1], whole=whole)

    monkeypatch.setattr(runs, "_add", backwards)
    assert "the gradient of" in failures(runs.CAMPAIGN, 40)


def test_a_loss_with_one_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = pykern.Pipeline.step

    def wrong(self: pykern.Pipeline, *args: Any, **named: Any) -> Tensor:
        loss = step(self, *args, **named)
        return torch.nextafter(loss, loss + 1)

    monkeypatch.setattr(pykern.Pipeline, "step", wrong)
    assert "the loss" in failures(runs.CAMPAIGN, 4)


def test_an_exception_that_is_another_object_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = faults._failed

    def copied(*args: Any) -> Any:
        return type(failed(*args))

    monkeypatch.setattr(faults, "_failed", copied)
    assert "AssertionError" in failures(faults.CAMPAIGN, 2)


def test_tensors_that_are_left_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    forward = Fuse.forward

    def keeps(self: Fuse, x: Tensor) -> Tensor:
        kept.append(forward(self, x))
        return kept[-1]

    monkeypatch.setattr(Fuse, "forward", keeps)
    assert "tensors are left" in failures(faults.CAMPAIGN, 2)


def test_pairs_that_are_left_by_an_interrupt_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ties, "end", lambda self: None)
    tied = {"a step: tied": lines.SUBJECTS["a step: tied"]}
    monkeypatch.setattr(lines, "SUBJECTS", tied)
    assert "AssertionError" in failures(lines.CAMPAIGN, 1)


@pytest.mark.parametrize(
    ("number", "message"),
    [(0, "ended with -6"), (1, "wrong after something"), (2, "begin something: $"), (3, "hangs")],
)
def test_what_a_signal_may_lead_to_is_seen(
    number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigints, "_PATIENCE_S", 20.0 if number < 3 else 4.0)
    with pytest.raises(AssertionError, match=message):
        list(sigints.cases(1, number, "tests.torture.broken_children"))


def test_lines_that_arrive_together_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigints, "_PATIENCE_S", 20.0)
    found = list(sigints.cases(1, 4, "tests.torture.broken_children"))
    assert found.count("signals") == sigints.SIGNALS


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program that is interrupted changes these for good."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


class InterruptedAsItGoes:
    """An interrupt arrives within its finalizer."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupt_a_finalize() -> None:
    weakref.finalize(nn.Identity(), signal.raise_signal, signal.SIGINT)


def catch_interrupt() -> None:
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), "right"),
        (InterruptedAsItGoes, "swallowed by Python in a finalizer: function InterruptedAsItGoes"),
        (interrupt_a_finalize, "swallowed by Python in a finalizer: finalize"),
        (catch_interrupt, "it was lost at test_controls.py:"),
    ],
)
def test_an_interrupt_that_is_not_raised_is_seen(act: Callable[[], object], outcome: str) -> None:
    assert sigint_child.interrupted("something", act, sigint_child.Arrival()).startswith(outcome)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("os.abort()", "ended with -6"),
        nightly("os._exit(3)", "ended with 3"),
        nightly("sys.stderr.write('Fatal Python error')", "Fatal"),
    ],
)
def test_an_end_of_another_kind_is_seen(ending: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        exits.require_end("control", "", ending, 0)


def test_a_program_that_a_limit_ends_is_seen() -> None:
    with pytest.raises(AssertionError, match="control: ended with 1"):
        limits.require_end("control", "raise MemoryError", 11)


def test_a_reader_that_believes_a_file_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykern.plan.files.json_form.checksum", lambda content: "any")
    monkeypatch.setattr("pykern.plan.files.proved.check", lambda plan: None)
    assert "AssertionError" in failures(files.CAMPAIGN, 12)


def test_a_reader_that_works_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CALLS", 10)
    monkeypatch.setattr(files, "_CALLS_A_BYTE", 0)
    assert "calls for" in failures(files.CAMPAIGN, 1)


class Counts(nn.Module):
    """Adds how often it has been called, which no pipeline may know of."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * self.calls


def net(*between: nn.Module) -> Case:
    layers = [nn.Linear(3, 3), *between, nn.Linear(3, 3)]
    return Case(nn.Sequential(*layers), (torch.randn(4, 3),), mean_of_squares, rows=4)


def test_a_model_that_differs_is_seen() -> None:
    assert many.outcome(net, 2) == many.Outcome("bit-equal")
    found = many.outcome(lambda: net(Counts()), 2)
    assert found.kind == "wrong"
    assert "relative error" in found.detail


def test_a_refusal_that_nobody_knows_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "all_models", lambda: {"a model": net})
    monkeypatch.setattr(models, "STAGES", (2, 9))
    assert failures(Campaign("", models.cases), 1) == ""
    assert "on 9 stages: refused" in failures(Campaign("", models.cases), 2)
