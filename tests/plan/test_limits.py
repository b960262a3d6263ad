"""Files that would take far more than their size are refused by looking at them."""

import json
import tracemalloc
from pathlib import Path

import pytest

from pykern.plan import Plan, files, load_plan, save_plan
from pykern.plan.files import json_form, proved, torch_csv
from pykern.plan.files.json_form import checksum, from_json, to_json
from pykern.plan.files.strict_json import MAX_DIGITS, MAX_NESTING, read_json
from pykern.plan.files.torch_csv import from_torch_csv, to_torch_csv
from pykern.schedules import one_f_one_b

CELLS = torch_csv.MAX_CELLS
SMALL = json.loads(to_json(one_f_one_b(1, 1)))


def plan_with(**values: object) -> str:
    content = SMALL | values
    return json.dumps(content | {"sha256": checksum(content)})


LARGE = {
    "bubbles.csv": (
        "," * CELLS,
        f"cells of a plan's file must be at most {CELLS}, got {CELLS + 1}",
    ),
    "lines.csv": ("\r\n" * CELLS, f"cells of a plan's file must be at most {CELLS}"),
    "actions.csv": ("0F0," * CELLS, f"cells of a plan's file must be at most {CELLS}"),
    "transfers.csv": (
        "0SEND_F0," * 500_000,
        "transfers must be at most two for each of 1 other cells, got 500000",
    ),
    "lists.json": ("[" + "[]," * CELLS + "[]]", "the JSON must have at most .* values, got"),
    "objects.json": ("[" + "{}," * CELLS + "{}]", "the JSON must have at most .* values, got"),
    "numbers.json": (
        plan_with(overlaps=[[0] * CELLS]),
        "the JSON must have at most .* values, got",
    ),
    "nested.json": ("[" * 10**5 + "]" * 10**5, "the JSON must have at most .* levels, got more"),
    "rows.json": (
        plan_with(rows=["0F0"] * 10**5),
        "rows must be 1, one for each device, got 100000",
    ),
    "overlaps.json": (
        plan_with(overlaps=[[]] * 10**5),
        "overlaps must be .*, one for each device, got 100000",
    ),
    "row.json": (
        plan_with(rows=["0F0 " * CELLS]),
        f"actions of a plan's file must be at most {proved.MAX_ACTIONS}",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_file_of_too_many_parts_is_refused_before_they_are_made(
    name: str, tmp_path: Path
) -> None:
    text, message = LARGE[name]
    path = tmp_path / name
    path.write_text(text)
    assert path.stat().st_size <= 1 << 24
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            load_plan(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Beside the buffer for the largest file; parts of a few bytes would take a hundred each.
    most = files.MAX_FILE_BYTES + 8 * len(text)
    assert peak < most or name in ("rows.json", "overlaps.json")


def test_what_is_read_is_written_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = one_f_one_b(2, 4)
    for name in ("plan.json", "plan.csv"):
        save_plan(plan, tmp_path / name)
    for module in ("pykern.plan.files", "pykern.plan.files.proved", "pykern.plan.files.torch_csv"):
        monkeypatch.setattr(f"{module}.MAX_ACTIONS", plan.num_actions - 1)
    for name in ("plan.json", "plan.csv"):
        with pytest.raises(ValueError, match="actions of a plan's file must be at most 15, got 16"):
            save_plan(plan, tmp_path / name)
        with pytest.raises(ValueError, match="actions of a plan's file must be at most 15, got 16"):
            load_plan(tmp_path / name)


def test_the_bounds_leave_room_for_large_plans() -> None:
    plan = one_f_one_b(8, 256)
    assert plan.num_actions * 250 < proved.MAX_ACTIONS
    assert from_json(to_json(plan))[0] == plan
    text = to_torch_csv(plan, transfers=True)
    assert (text.count(",") + text.count("\n")) * 100 < CELLS
    found: Plan = from_torch_csv(text)
    assert found == plan
    assert json_form.MAX_VALUES >= proved.MAX_ACTIONS


@pytest.mark.parametrize("pair", ["[]", '{"a":', "[1,"])
def test_json_nests_as_far_as_is_said_on_any_python(pair: str) -> None:
    closing = {"[]": "]", '{"a":': "}", "[1,": "]"}[pair]
    opening = pair.removesuffix("]")

    def nested(levels: int) -> str:
        return opening * levels + "0" + closing * levels

    read_json(nested(MAX_NESTING))
    read_json(json.dumps("[{" * 1000))
    read_json(json.dumps({'\\"[': "]" * 9}))
    with pytest.raises(ValueError, match=r"the JSON must have at most .* levels, got more"):
        read_json(nested(MAX_NESTING + 1))


def test_whole_numbers_have_a_limit_of_their_own() -> None:
    """The message was Python's, which tells how to lift the interpreter's limit."""
    assert read_json("1" * MAX_DIGITS) == int("1" * MAX_DIGITS)
    text = to_json(one_f_one_b(1, 1)).replace('"num_slices": 1', f'"num_slices": {"1" * 5000}')
    with pytest.raises(
        ValueError, match=f"numbers must have at most {MAX_DIGITS} digits, got 5000"
    ):
        from_json(text)
