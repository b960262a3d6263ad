"""Mutated plans: accepted if, and only if, the rules in plain Python accept them."""

import operator
import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from pykern import schedules
from pykern.plan import Action, Costs, Plan, PlanError, check, check_lowered, lower, simulate

from .campaign import Campaign
from .raw import Form, Raw, RawAction, random_plan, raw_of
from .rules import KINDS, broken, is_table

_FORM = Form()
# How many mutated plans one plan gives.
PER_PLAN = 10
# Each of so many accepted plans is also simulated, and given copies.
_LOOKED_AT = 8


def cases(seed: int, number: int) -> Iterator[str]:
    """A plan and some that were made of it by a few changes each."""
    rng = random.Random(f"{seed} {number}")
    valid = _valid(rng)
    assert not broken(valid), valid
    yield from compare(valid)
    for turn in range(PER_PLAN - 1):
        mutant = valid.copy()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutant = rng.choice(MUTATIONS)(rng, mutant)
        yield from compare(mutant, looks=turn % _LOOKED_AT == 0)
    yield from _compare_text(rng, valid)


_ACTION = re.compile(
    r"(0|[1-9][0-9]*)(COPY_F|COPY_B|REDUCE|OFFLOAD|LOAD|[FRBIWU])(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?"
)
_LETTERS = "0123456789FRBIWULOAD_.-+ \x00é٣"


def _compare_text(rng: random.Random, raw: Raw) -> Iterator[str]:
    """An action's text with some characters changed is read as the grammar says."""
    yield "texts"
    row = rng.choice([row for row in raw.rows if row])
    kind, stage, microbatch, part = rng.choice(row)
    letters = list(f"{stage}{kind}{microbatch}" + (f".{part}" if part else ""))
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(letters) + 1)
        letters[place : place + rng.randrange(2)] = rng.choice(_LETTERS) * rng.choice((0, 1, 1, 9))
    text = "".join(letters)
    match = _ACTION.fullmatch(text)
    numbers = [int(match[field] or 0) for field in (1, 3, 4)] if match else []
    fits = bool(numbers) and all(map(operator.lt, numbers, (1 << 16, 1 << 32, 1 << 8)))
    try:
        action = Action.parse(text)
    except ValueError:
        assert not fits, text
        return
    assert fits, text
    assert [action.stage, action.microbatch, action.slice] == numbers, text
    assert str(action) == text
    yield "texts accepted"


def compare(raw: Raw, *, looks: bool = False) -> Iterator[str]:
    """Has both say what they think of it."""
    yield "plans"
    try:
        plan = raw.plan()
    except (ValueError, TypeError):
        assert not is_table(raw), raw
        yield "not a table"
        return
    assert is_table(raw), raw
    expected = broken(raw)
    error = _refusal(plan)
    if error is not None:
        assert error.rule in expected, (error.rule, expected, raw)
        _require_place(plan, error)
        yield f"refused by {error.rule}"
        return
    assert not expected, (expected, raw)
    yield "accepted"
    if looks:
        _look_at(plan)


def _refusal(plan: Plan) -> PlanError | None:
    try:
        check(plan)
    except PlanError as error:
        return error
    return None


def _require_place(plan: Plan, error: PlanError) -> None:
    """The error names a place of the plan, or one behind the end of a row where one is missing."""
    assert 0 <= error.device < plan.num_devices, error
    assert 0 <= error.position <= len(plan.rows[error.device]), error
    assert "^ here" in str(error), error


def _look_at(plan: Plan) -> None:
    timeline = simulate(plan, Costs(1.0, 2.0, 0.5))
    assert [len(row) for row in timeline.rows] == [len(row) for row in plan.rows]
    if plan.num_slices == 1:
        check_lowered(lower(plan))


def _valid(rng: random.Random) -> Raw:
    if rng.random() < 0.7:
        for _ in count():
            raw = random_plan(rng, _FORM)
            # Two that start together may have closed a circle.
            if not any(raw.overlaps) or not broken(raw):
                return raw
    while True:
        make = schedules.by_name[rng.choice(sorted(schedules.by_name))]
        try:
            return raw_of(make(rng.randint(1, 4), rng.randint(1, 4)))
        except ValueError:
            continue  # not a count that the schedule takes


Mutation = Callable[[random.Random, Raw], Raw]


def _place(rng: random.Random, raw: Raw) -> tuple[list[RawAction], int] | None:
    rows = [row for row in raw.rows if row]
    if not rows:
        return None
    row = rng.choice(rows)
    return row, rng.randrange(len(row))


def _swap(rng: random.Random, raw: Raw) -> Raw:
    """Two actions of a row, mostly neighbours."""
    if found := _place(rng, raw):
        row, one = found
        other = min(one + 1, len(row) - 1) if rng.random() < 0.7 else rng.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    return raw


def _move(rng: random.Random, raw: Raw) -> Raw:
    """An action to another place, mostly of its row."""
    if found := _place(rng, raw):
        row, one = found
        target = row if rng.random() < 0.8 else rng.choice(raw.rows)
        action = row.pop(one)
        target.insert(rng.randint(0, len(target)), action)
    return raw


def _drop(rng: random.Random, raw: Raw) -> Raw:
    """An action, or all of its kind, or all that its cell has of I and W, or of both of a pair."""
    if found := _place(rng, raw):
        row, one = found
        kind, *cell = row[one]
        gone = rng.choice(((kind,), (kind,), KINDS, ("OFFLOAD", "LOAD"), ("B", "I", "W", "R")))
        whole = rng.random() < 0.3
        for each in raw.rows:
            each[:] = [a for a in each if a[0] not in gone or (not whole and [*a[1:]] != cell)]
    return raw


def _duplicate(rng: random.Random, raw: Raw) -> Raw:
    if found := _place(rng, raw):
        row, one = found
        target = row if rng.random() < 0.7 else rng.choice(raw.rows)
        target.insert(rng.randint(0, len(target)), row[one])
    return raw


def _add(rng: random.Random, raw: Raw) -> Raw:
    """An action of any kind beside one of its cell."""
    if found := _place(rng, raw):
        row, one = found
        row.insert(rng.randint(0, len(row)), (rng.choice(KINDS), *row[one][1:]))
    return raw


def _change(rng: random.Random, raw: Raw) -> Raw:
    """The kind or a number of an action."""
    if found := _place(rng, raw):
        row, one = found
        action: list[Any] = list(row[one])
        field = rng.randrange(4)
        near = (0, 1, max(action[field] - 1, 0), action[field] + 1) if field else KINDS
        action[field] = rng.choice(near)
        row[one] = (action[0], action[1], action[2], action[3])
    return raw


def _far(rng: random.Random, raw: Raw) -> Raw:
    """A number of an action becomes one at an end of its range, or beyond it."""
    if found := _place(rng, raw):
        row, one = found
        action: list[Any] = list(row[one])
        most = ((1 << 16) - 1, (1 << 32) - 1, (1 << 8) - 1)
        field = rng.randrange(3)
        action[1 + field] = most[field] - rng.randrange(2)
        row[one] = (action[0], action[1], action[2], action[3])
    return raw


def _halve(rng: random.Random, raw: Raw) -> Raw:
    """A B becomes an I and a W, the W anywhere; or these become a B."""
    if found := _place(rng, raw):
        row, one = found
        kind, *_ = action = row[one]
        if kind == "B":
            row[one] = ("I", *action[1:])
            row.insert(rng.randint(0, len(row)), ("W", *action[1:]))
        elif kind == "I":
            row[one] = ("B", *action[1:])
            row[:] = [each for each in row if each != ("W", *action[1:])]
    return raw


def _replace_stage(rng: random.Random, raw: Raw) -> Raw:
    """A stage to another device; its actions go along or do not."""
    replica = rng.choice(raw.replicas)
    replica[rng.randrange(len(replica))] = rng.randrange(-1, raw.num_devices + 1)
    if rng.random() < 0.7 and is_table(raw):
        actions = [action for row in raw.rows for action in row if action[1] < raw.num_stages]
        for row in raw.rows:
            row.clear()
        for action in actions:
            raw.rows[raw.device_of(action)].append(action)
    return raw


def _counts(rng: random.Random, raw: Raw) -> Raw:
    """The counts of the plan, whose table stays."""
    numbers = [raw.num_devices, raw.num_microbatches, raw.num_slices]
    numbers[rng.randrange(3)] += rng.choice((-1, 1, 1, 300))
    return Raw(numbers[0], raw.replicas, numbers[1], numbers[2], raw.rows, raw.overlaps)


def _rows(rng: random.Random, raw: Raw) -> Raw:
    """Rows change places, or one is gone, empty, or there twice."""
    one, other = rng.randrange(len(raw.rows)), rng.randrange(len(raw.rows))
    what = rng.randrange(4)
    if what == 0:
        raw.rows[one], raw.rows[other] = raw.rows[other], raw.rows[one]
    elif what == 1 and len(raw.rows) > 1:
        del raw.rows[one]
    elif what == 2:
        raw.rows[one].clear()
    else:
        raw.rows.append(list(raw.rows[one]))
    return raw


def _stages(rng: random.Random, raw: Raw) -> Raw:
    """A stage is gone from one replica or from all, or there is another replica."""
    what = rng.randrange(3)
    if what == 0 and raw.num_stages > 1:
        raw.replicas[rng.randrange(len(raw.replicas))].pop()
    elif what == 1 and raw.num_stages > 1:
        for replica in raw.replicas:
            replica.pop()
    else:
        raw.replicas.append(list(rng.choice(raw.replicas)))
    return raw


def _overlaps(rng: random.Random, raw: Raw) -> Raw:
    """Pairs are put anywhere, or taken away."""
    if not raw.overlaps:
        raw.overlaps.extend([] for _ in raw.rows)
    starts = rng.choice(raw.overlaps)
    if starts and rng.random() < 0.5:
        starts.pop(rng.randrange(len(starts)))
        return raw
    row = raw.rows[min(raw.overlaps.index(starts), len(raw.rows) - 1)]
    starts.append(rng.randrange(len(row) + 1))
    if rng.random() < 0.8:
        starts.sort()
    return raw


MUTATIONS: tuple[Mutation, ...] = (
    *(_swap, _swap, _swap, _move, _move, _drop, _duplicate, _add, _change, _change, _far),
    *(_halve, _halve, _replace_stage, _counts, _rows, _stages, _overlaps, _overlaps),
)

CAMPAIGN = Campaign(
    promise=(
        "A plan is accepted if and only if a second implementation of docs/plan-rules.md in plain "
        "Python accepts the plan. A refusal names a broken rule."
    ),
    case=cases,
)
