"""Files with random damage: each is refused in words, or is a plan that runs."""

import csv
import random
import re
from pathlib import Path

import pytest

from pykern.plan import Costs, Plan, check, load_plan, save_plan
from pykern.plan.files.json_form import checksum
from pykern.plan.files.strict_json import read_json
from pykern.schedules import by_name
from tests.plan.strategies import random_plan_for_torch
from tests.plan.transfer_rules import Rows

NUMBERS = ["0", "-1", "1e999", "00", "65536", "4294967296", "9" * 400, "1.5", "NaN", ""]
PIECES = [
    *'[]{},:;()"\\ \n\r\0',
    "null",
    "true",
    "\ud800",
    "\u0660",
    "0F0",
    "2B1",
    "0SEND_F0",
    "0F0.1",
]


def damaged(text: str, rng: random.Random) -> str:
    """The text with one to three changes of a few characters each."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.choice([0, 1, 1, 2, 8, 40]))
        other = rng.randrange(len(text) + 1)
        match rng.randrange(5):
            case 0:
                piece = rng.choice(PIECES)
            case 1:
                piece = text[other : other + rng.choice([1, 3, 10])]
            case 2:
                piece = text[at:to] * 2
            case 3:
                spans = [found.span() for found in re.finditer(r"\d+", text)]
                at, to = rng.choice(spans or [(at, to)])
                piece = rng.choice([*NUMBERS, str(rng.randrange(9))])
            case _:
                piece = ""
        text = text[:at] + piece + text[to:]
    return text


def resealed(text: str) -> str:
    """With the checksum of what it says now, where it can be read at all."""
    try:
        return re.sub(r'"sha256": "[^"]*"', f'"sha256": "{checksum(read_json(text))}"', text)
    except (ValueError, AttributeError):
        return text


def expect_refused_or_runnable(path: Path, rng: random.Random) -> bool:
    """Whether it is taken."""
    plan, said = None, str(path)
    try:
        plan = load_plan(path)
    except ValueError as error:
        said = str(error)
    # On one terminal, whatever the file holds.
    assert said.startswith(str(path))
    assert said.isascii()
    if plan is None:
        return False
    check(plan)
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            cells = list(csv.reader(file))
        if any("SEND" in cell or "RECV" in cell for row in cells for cell in row):
            rows = Rows(cells)
            rows.expect_matched()
            rows.expect_computable()
    again = path.with_name(f"again{path.suffix}")
    save_plan(plan, again)
    assert load_plan(again) == plan
    return True


def fuzz(folder: Path, seed: int, count: int) -> int:
    """How many of the damaged files were taken."""
    rng = random.Random(seed)
    taken = 0
    for number in range(count):
        plan: Plan
        if number % 2:
            plan = random_plan_for_torch(rng, 2)
        else:
            plan = by_name[rng.choice(["gpipe", "one_f_one_b", "hanayo", "zb_h1"])](2, 4)
        suffix = rng.choice([".json", ".csv", ".comms.csv"])
        path = folder / f"plan{suffix}"
        costs = Costs(1, 2) if suffix == ".json" and rng.random() < 0.5 else None
        save_plan(plan, path, costs=costs, transfers=suffix == ".comms.csv")
        text = damaged(path.read_text(), rng)
        if suffix == ".json" and rng.random() < 0.8:
            text = resealed(text)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        taken += expect_refused_or_runnable(path, rng)
    return taken


def test_damaged_files_are_refused_or_plans(tmp_path: Path) -> None:
    assert 3 < fuzz(tmp_path, seed=1, count=160) < 80


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_damaged_files_are_refused_or_plans(tmp_path: Path, seed: int) -> None:
    assert 0 < fuzz(tmp_path, seed, count=50_000) < 25_000
