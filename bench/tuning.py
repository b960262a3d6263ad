"""The choices of `pykern.tune` for five models, beside a run of every plan that it looks at.

    python -m bench.tuning --out tuning.jsonl
    python -m bench.tuning --only mlp --smoke

Every number of microbatches and of replicas, and every plan of the catalogue with its options is
run, with the cut whose slowest stage takes least. Then the fastest of them, the choice and the
default `Pipeline` run in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.models import gpt, llama, next_token_loss
from pykern.pipeline.left_alone import left_alone
from pykern.plan import Plan
from pykern.tuning.asked import Asked
from pykern.tuning.space import balanced_spans, max_chunks_of, plans_of, shares_of

ROUNDS, WARMUPS = 5, 1
# The fastest of all plans that run once more, beside the choice and the default: rounds, and how
# often each pipeline is made anew. Two pipelines of one plan have differed by 1.6 %.
FINALISTS, FINAL_ROUNDS, FINAL_PIPELINES = 4, 20, 3
DEVICES = "cpu:2"


class Subject(NamedTuple):
    """A model with a batch."""

    model: nn.Module
    sample: Any
    target: Any
    loss_fn: Callable[..., Any]


def _text(model: nn.Module, small: bool) -> Subject:
    ids = torch.randint(256, (4, 9) if small else (16, 65))
    return Subject(model, ids[:, :-1], ids[:, 1:], next_token_loss)


def _gpt(small: bool) -> Subject:
    if small:
        return _text(gpt(layers=2, width=16, heads=4, context=8), small)
    return _text(gpt(layers=4, width=128, heads=4, context=64), small)


def _llama(small: bool) -> Subject:
    if small:
        return _text(llama(layers=2, width=16, heads=4, hidden=56), small)
    return _text(llama(layers=4, width=128, heads=4, hidden=448), small)


class UNet(nn.Module):
    """Two levels down and up, with values that skip the middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        kept = F.relu(self.into(x))
        low = F.relu(self.middle(F.relu(self.down(kept))))
        return self.out(torch.cat([kept, F.relu(self.up(low))], dim=1))


def _unet(small: bool) -> Subject:
    rows, side = (4, 8) if small else (16, 32)
    x = torch.randn(rows, 3, side, side)
    return Subject(UNet(4 if small else 32), x, x, F.mse_loss)


def _bert(small: bool) -> Subject:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415 - an extra of tests

    width = 16 if small else 128
    config = BertConfig(
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=2 if small else 4,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    ids = torch.randint(256, (4 if small else 16, 32))

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return Subject(BertForMaskedLM(config), ids, ids, loss)


def _mlp(small: bool) -> Subject:
    """Layers with few parameters and much work, then the other way round."""
    width, rows, depth = (16, 2, 2) if small else (256, 16, 24)

    def repeated() -> nn.Module:
        parts = [part for _ in range(depth) for part in (nn.Linear(narrow, narrow), nn.Tanh())]
        return nn.Sequential(nn.Unflatten(1, (16, -1)), *parts, nn.Flatten())

    narrow = width // 16
    layers = [nn.Linear(width, width), *(repeated() for _ in range(4))]
    layers += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    x = torch.randn(rows, width)
    return Subject(nn.Sequential(*layers), x, x, F.mse_loss)


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "gpt": _gpt,
    "llama": _llama,
    "unet": _unet,
    "bert": _bert,
    "mlp": _mlp,
}


class Candidate(NamedTuple):
    """A plan of the space, with the cut whose slowest stage takes least.

    Attributes:
        schedule: the name of the schedule, with its options.
        plan: the plan of all replicas.
        spans: the units of each stage.
    """

    schedule: str
    plan: Plan
    spans: tuple[range, ...]


def space(choice: pykern.Choice) -> Iterator[Candidate]:
    """Every plan that the search looks at before it makes orders of its own."""
    asked, measured = choice.asked, choice.measured
    num_units = len(measured.units)
    for shares in shares_of(asked.num_devices, asked.rows, replicated=asked.can_have_replicas):
        if max_chunks_of(shares, num_units) == 0:
            continue
        for name, of_one in plans_of(shares, num_units):
            plan = shares.side_by_side(of_one)
            rows = asked.rows / plan.num_microbatches
            yield Candidate(name, plan, balanced_spans(measured, plan.num_stages, rows))


def medians(pipes: Sequence[pykern.Pipeline], batch: Any, rounds: int) -> list[float]:
    """The median step of each, in ns."""
    return [statistics.median(taken) for taken in times_in_turn(pipes, batch, rounds)]


def times_in_turn(pipes: Sequence[pykern.Pipeline], batch: Any, rounds: int) -> list[list[int]]:
    """The steps of each, in ns. They run in turn, so that a slow moment is everyone's.

    Each runs two steps, of which the second counts: the first finds in the caches what another
    pipeline has left there. Every round begins with another one, so none always runs behind its
    like.
    """
    (args, kwargs), target = batch
    times: list[list[int]] = [[] for _ in pipes]
    for number in range(WARMUPS + rounds):
        for place in range(len(pipes)):
            one = (number + place) % len(pipes)
            pipe, taken = pipes[one], times[one]
            pipe.step(*args, target=target, **kwargs)
            start = time.perf_counter_ns()
            pipe.step(*args, target=target, **kwargs)
            if number >= WARMUPS:
                taken.append(time.perf_counter_ns() - start)
    return times


def fastest(choice: pykern.Choice, most: int | None) -> tuple[list[Candidate], int]:
    """The candidates with the shortest steps after each has run, and how many have run."""
    asked = choice.asked
    batch = asked.batch(asked.rows)
    found: list[tuple[float, int, Candidate]] = []
    for number, candidate in enumerate(islice(space(choice), most)):
        with asked.pipeline(candidate.plan, candidate.spans) as pipe:
            [step] = medians([pipe], batch, ROUNDS)
            found.append((step, number, candidate))
    return [candidate for *_, candidate in sorted(found)[:FINALISTS]], len(found)


def compared(name: str, *, smoke: bool) -> dict[str, Any]:
    """The choice, the best of all, and the default, with the time that each search took.

    The fastest of all, the choice and the default run in turn at the end. The least of many medians
    would be that with the quietest moments, so every other round tells which plan is the best, and
    the rest of the rounds what it takes.
    """
    torch.manual_seed(0)
    subject = SUBJECTS[name](smoke)
    given: dict[str, Any] = subject._asdict()
    start = time.perf_counter()
    choice = pykern.tune(given.pop("model"), devices=DEVICES, **given)
    tuned_s = time.perf_counter() - start
    asked: Asked = choice.asked
    # Every other round tells the best plan, and the rest what it takes: one of each.
    final_rounds = 2 if smoke else FINAL_ROUNDS
    with left_alone([asked.model]):
        start = time.perf_counter()
        candidates, num_plans = fastest(choice, 6 if smoke else None)
        exhaustive_s = time.perf_counter() - start
        taken: list[list[int]] = [[] for _ in range(2 + len(candidates))]
        for _ in range(1 if smoke else FINAL_PIPELINES):
            with ExitStack() as opened:
                pipes = [opened.enter_context(pipe) for pipe in finals(subject, choice, candidates)]
                turns = times_in_turn(pipes, asked.batch(asked.rows), final_rounds)
            for of_one, more in zip(taken, turns, strict=True):
                of_one.extend(more)
    _, _, *telling = (statistics.median(of[::2]) for of in taken)
    default, chosen, *others = (statistics.median(of[1::2]) for of in taken)
    number = telling.index(min(telling))
    best = candidates[number]
    return {
        "model": name,
        "chosen_ms": chosen / 1e6,
        "best_ms": others[number] / 1e6,
        "default_ms": default / 1e6,
        "above_best": chosen / others[number] - 1,
        "speedup_over_default": default / chosen,
        "plans": num_plans,
        "share_of_time": tuned_s / exhaustive_s,
        "schedule": choice.best.schedule,
        "microbatches": choice.best.microbatches,
        "replicas": choice.best.replicas,
        "best": [best.schedule, best.plan.num_microbatches, best.plan.placement.num_replicas],
    }


def finals(
    subject: Subject, choice: pykern.Choice, candidates: Sequence[Candidate]
) -> Iterator[pykern.Pipeline]:
    """The default pipeline, the chosen one, and one of each candidate."""
    sample = subject.sample if not isinstance(subject.model, nn.Sequential) else None
    yield pykern.Pipeline(
        subject.model, devices=DEVICES, microbatches=4, loss_fn=subject.loss_fn, sample=sample
    )
    yield choice.pipeline()
    for one in candidates:
        yield choice.asked.pipeline(one.plan, one.spans)


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="results are written to this file")
    parser.add_argument("--only", default="", help="models whose names begin like this")
    parser.add_argument("--smoke", action="store_true", help="tiny models, six plans each")
    arguments = parser.parse_args()
    found = []
    for name in SUBJECTS:
        if name.startswith(arguments.only):
            found.append(compared(name, smoke=arguments.smoke))
            print(json.dumps(found[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(f"{json.dumps(one)}\n" for one in found), encoding="utf-8")


if __name__ == "__main__":
    main()
