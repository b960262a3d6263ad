"""Measures the contenders of a claim side by side and says which of them differ.

It knows nothing of pipelines: a contender is a step to call, with gradients to compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pykern.benchmark.compare import FigureVerdict, verdict_of
from pykern.benchmark.figures import interval_of

_WARMUP_ROUNDS = 3


class Rounds(Protocol):
    """Calls a round as often as it is told, as pytest-benchmark's fixture does."""

    def pedantic(self, target: Callable[[], object], *, rounds: int, warmup_rounds: int) -> object:
        """Calls it for every round, those of the warm-up first."""


class PlainRounds:
    """Rounds outside pytest."""

    def pedantic(self, target: Callable[[], object], *, rounds: int, warmup_rounds: int) -> None:
        """Calls it for every round."""
        for _ in range(warmup_rounds + rounds):
            target()


@dataclass(frozen=True)
class Contender:
    """One way to do the step that a claim is about.

    Attributes:
        name: Its name in the tables.
        step: Runs one step and returns its loss. This alone is timed.
        gradients: Every gradient that the step left, by name of the parameter.
        prepare: Called before each step, untimed: clears gradients, sets the number of threads.
    """

    name: str
    step: Callable[[], float]
    gradients: Callable[[], Mapping[str, Tensor]]
    prepare: Callable[[], object]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_this_process(
    name: str, model: nn.Module, num_threads: int, step: Callable[[], Tensor]
) -> Contender:
    """A step that runs in this process, on a model whose gradients are cleared before each.

    Args:
        name: Its name in the tables.
        model: Collects the gradients.
        num_threads: Intra-op threads of torch in the thread that calls the step.
        step: Returns the loss.
    """

    def prepare() -> None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        model.zero_grad()

    return Contender(name, lambda: step().item(), lambda: gradients_of(model), prepare)


@dataclass(frozen=True)
class Record:
    """The measurement of one contender in one case of a claim.

    Attributes:
        noise: Distance of the percentiles as a share of the median.
        ratio: Median as a multiple of the baseline's: below 1 is faster.
        figures: The claim's own figures, by name with unit.
    """

    claim: str
    case: str
    contender: str
    baseline: str
    rounds: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    noise: float
    ratio: float
    verdict: FigureVerdict | Literal["BASELINE"]
    figures: Mapping[str, float] = field(default_factory=dict)


def assert_same_answer(contenders: Sequence[Contender], tolerance: float = 1e-5) -> None:
    """Every contender has the loss and the gradients of the first one.

    Args:
        contenders: The first is the reference.
        tolerance: Error allowed to the loss, and to each gradient as a vector: a share of its size.
    """
    loss, gradients = _answer(contenders[0])
    for contender in contenders[1:]:
        found_loss, found = _answer(contender)
        assert abs(found_loss - loss) <= tolerance * abs(loss), (contender.name, found_loss, loss)
        assert found.keys() == gradients.keys(), contender.name
        for name, gradient in gradients.items():
            size = gradient.norm().item()
            error = (found[name] - gradient).norm().item()
            assert size > 0, f"{name} has no gradient to compare"
            assert error <= tolerance * size, (contender.name, name, error / size)


def _answer(contender: Contender) -> tuple[float, dict[str, Tensor]]:
    contender.prepare()
    loss = contender.step()
    return loss, {name: gradient.clone() for name, gradient in contender.gradients().items()}


def interleave(
    benchmark: Rounds,
    contenders: Sequence[Contender],
    rounds: int,
    settle_s: float = 0.0,
    clock: Callable[[], int] = time.perf_counter_ns,
    in_a_row: int = 1,
) -> dict[str, list[float]]:
    """Times the contenders in turn, A B C A B C, so that drift of the machine hits all alike.

    Args:
        benchmark: Drives the rounds; with benchmarks disabled it runs a single one.
        contenders: Run in this order in every round.
        rounds: Samples per contender, after some rounds that do not count.
        settle_s: Pause before each step, for threads of the one before that still spin.
        clock: Nanoseconds, of the wall or, by `time.process_time_ns`, of this process's threads.
        in_a_row: Steps of a contender before it is the next one's turn, as in training, where a
            step finds in the caches what the last one has left. A sample is their mean.

    Returns:
        Milliseconds of each round, by contender.
    """
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def one_round() -> None:
        for contender in contenders:
            passed_ns = 0
            for _ in range(in_a_row):
                contender.prepare()
                time.sleep(settle_s)
                start = clock()
                contender.step()
                passed_ns += clock() - start
            samples[contender.name].append(passed_ns / in_a_row / 1e6)

    benchmark.pedantic(one_round, rounds=rounds, warmup_rounds=_WARMUP_ROUNDS)
    return {name: times[-rounds:] for name, times in samples.items()}


def judge(
    claim: str,
    case: str,
    samples: Mapping[str, Sequence[float]],
    baseline: str,
    figures: Callable[[float, float], Mapping[str, float]],
) -> list[Record]:
    """One record per contender.

    Args:
        claim: Name of the claim, which its results file starts with.
        case: Which of the claim's cases these samples are of.
        samples: Milliseconds, as `interleave` returns them; at least two per contender.
        baseline: The contender that the others are compared with.
        figures: Called with the medians of a contender and of the baseline, in milliseconds.
    """
    median = {name: statistics.median(times) for name, times in samples.items()}
    interval = {name: interval_of(times) for name, times in samples.items()}
    return [
        Record(
            claim=claim,
            case=case,
            contender=name,
            baseline=baseline,
            rounds=len(times),
            median_ms=median[name],
            p20_ms=interval[name][0],
            p80_ms=interval[name][1],
            noise=(interval[name][1] - interval[name][0]) / median[name],
            ratio=median[name] / median[baseline],
            verdict="BASELINE"
            if name == baseline
            else verdict_of(median[name] / median[baseline], interval[name], interval[baseline]),
            figures=figures(median[name], median[baseline]),
        )
        for name, times in samples.items()
    ]
