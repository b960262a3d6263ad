"""Plans as files: what is saved is loaded, and nothing but a plan that can run is."""

import errno
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import (
    Action,
    Costs,
    Placement,
    Plan,
    PlanError,
    files,
    load_plan,
    load_plan_and_costs,
    save_plan,
)
from pykern.plan.files.json_form import checksum, from_json, to_json
from pykern.schedules import by_name, hanayo, one_f_one_b
from tests.plan.strategies import valid_plans

COSTS = Costs(
    1.5,
    [2, 3],
    0.25,
    recompute_ns=1.25,
    input_ns=[1, 1.5],
    weight_ns=1e-3,
    update_ns=[4, 5],
    reduce_ns=6,
    overhead_ns=0.5,
    message_bytes=[7, 8],
    bandwidth=9,
    shared_links=True,
    overlap=0.75,
    device_speeds=[1, 2],
)


def content(**changes: Any) -> str:
    """A small plan's JSON with other values and the checksum that they need."""
    values = json.loads(to_json(one_f_one_b(2, 2), COSTS)) | changes
    values = {key: value for key, value in values.items() if value is not ...}
    return json.dumps(values | {"sha256": changes.get("sha256", checksum(values))})


def resealed(values: Any) -> str:
    return json.dumps(values | {"sha256": checksum(values)})


@given(valid_plans())
def test_any_plan_survives_json(plan: Plan) -> None:
    assert from_json(to_json(plan)) == (plan, None)


@pytest.mark.parametrize("name", by_name)
def test_every_schedule_survives_a_file(name: str, tmp_path: Path) -> None:
    plan = by_name[name](4, 8)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_costs_are_kept(tmp_path: Path) -> None:
    plan = one_f_one_b(2, 2)
    save_plan(plan, tmp_path / "plan.JSON", costs=COSTS)
    assert load_plan_and_costs(str(tmp_path / "plan.JSON")) == (plan, COSTS)


def test_infinite_bandwidth_is_kept_in_plain_json() -> None:
    text = to_json(one_f_one_b(2, 2), Costs(1, 2))
    assert json.loads(text)["costs"]["bandwidth"] is None
    assert "Infinity" not in text
    assert from_json(text)[1] == Costs(1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shared_links", 1),
        ("shared_links", None),
        ("overlap", 2),
        ("bandwidth", 0),
        ("transfer_ns", None),
        ("device_speeds", [1]),
        ("device_speeds", 0),
    ],
)
def test_each_cost_keeps_its_own_rule(name: str, value: object) -> None:
    costs = json.loads(to_json(one_f_one_b(2, 2), COSTS))["costs"] | {name: value}
    with pytest.raises(ValueError, match=name.removesuffix("s")):
        from_json(content(costs=costs))


def test_overlapped_pairs_are_kept() -> None:
    row = [Action.parse(text) for text in ["0F0", "0F1", "0B0", "0B1"]]
    plan = Plan(Placement.linear(1), 2, [row], overlaps=[[1]])
    assert from_json(to_json(plan)) == (plan, None)


def test_the_text_is_for_people_too() -> None:
    assert (
        to_json(one_f_one_b(2, 1))
        == """{
  "format": "pykern-plan",
  "version": 1,
  "num_devices": 2,
  "num_stages": 2,
  "num_microbatches": 1,
  "num_slices": 1,
  "replicas": [
    [0, 1]
  ],
  "rows": [
    "0F0 0B0",
    "1F0 1B0"
  ],
  "overlaps": [
    [],
    []
  ],
  "sha256": "f576efc56ce7f17e5e74bbe814963508039675b77bf82fbab6c9a1f2074dce93"
}
"""
    )


def test_layout_and_order_of_keys_are_free() -> None:
    values = json.loads(to_json(one_f_one_b(2, 2)))
    assert from_json(json.dumps(dict(reversed(values.items())), indent=7))[0] == one_f_one_b(2, 2)


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_a_failed_write_leaves_the_old_file(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"plan{suffix}"
    save_plan(one_f_one_b(2, 2), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=rf"no space left: '{re.escape(str(path))}'"):
        save_plan(hanayo(2, 2), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Plan(Placement.linear(1), 1, [[Action.parse("0B0")]])
    plan = one_f_one_b(2, 2)
    for path, options, message in (
        ("plan.yaml", {}, r"must end in \.json or \.csv, got .*plan\.yaml"),
        ("plan.csv", {"costs": COSTS}, r"costs must be kept in a .json, got .*plan\.csv"),
        (
            "plan.json",
            {"transfers": True},
            r"transfers must be written into a .csv, got .*plan\.json",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            save_plan(plan, tmp_path / path, **options)
    for costs in (Costs([1, 2, 3], 1), Costs(1, 1, device_speeds=[1])):
        with pytest.raises(ValueError, match=r"costs\..* or a list of 2, got \["):
            save_plan(plan, tmp_path / "plan.json", costs=costs)
    for path in ("plan.json", "plan.csv"):
        with pytest.raises(PlanError, match="P005"):
            save_plan(wrong, tmp_path / path)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 99)
    with pytest.raises(ValueError, match="must have at most 99 bytes, got more"):
        save_plan(plan, tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


REFUSED = [
    ("", "the text must be JSON, got its end at line 1, column 1"),
    ('{"a":\n', "the text must be JSON, got its end at line 2, column 1"),
    ("[1 2]", "the text must be JSON, got '2' at line 1, column 4"),
    ("[]", "a plan must be a JSON object, got []"),
    ("[" * 100_000, "levels, got more"),
    ('{"format": "pykern-plan", "format": 1}', "keys must occur once, got 'format' twice"),
    ('{"a": NaN}', "numbers of JSON must be finite, got NaN"),
    ('{"a": -Infinity}', "numbers of JSON must be finite, got -Infinity"),
    ('{"a": ' + "9" * 5000 + "}", "numbers must have at most 640 digits, got 5000"),
    (content(format="torch"), "format must be 'pykern-plan', got 'torch'"),
    (content(version=2), "version must be 1, got 2"),
    (content(version=True), "version must be 1, got True"),
    (content(version=1.0), "version must be 1, got 1.0"),
    (content(extra=0), "a plan must have known keys only, got 'extra'"),
    (content(rows=...), "a plan must have the key 'rows', got none"),
    (content(sha256="0"), "sha256 must be "),
    (to_json(one_f_one_b(2, 2)).replace("0F1 0B0", "0B0 0F1"), "sha256 must be "),
    (content(num_devices=0), "num_devices must be an int from 1 to 16777216, got 0"),
    (content(num_devices=2.0), "num_devices must be an int from 1 to 16777216, got 2.0"),
    (content(num_devices="2"), "num_devices must be an int from 1 to 16777216, got '2'"),
    (content(num_devices=3), "rows must be 3, one for each device, got 2"),
    (content(num_stages=3), "num_stages must be 2, got 3"),
    (content(num_microbatches=1 << 24), "actions must be at least one for each of 2 stages,"),
    (content(num_microbatches=3), "P005"),
    (content(num_slices=300), "actions must be at least one for each of"),
    (content(replicas=[]), "num_replicas must be 1 to 65536, got 0"),
    (content(replicas=[[0, 2]]), "devices of stages must be 0 to 1, got 2 for stage 1"),
    (content(replicas=[[0, -1]]), "replicas[0][1] must be an int from 0 to 16777216, got -1"),
    (content(replicas=[0, 1]), "replicas[0] must be a list, got 0"),
    (content(rows="0F0"), "rows must be a list, got '0F0'"),
    (content(rows=[["0F0"]]), "rows[0] must be a string of actions, got ['0F0']"),
    (content(rows=["0F0 0F1  0B0", ""]), "rows[0], position 2: an action must be"),
    (content(rows=["\x1b[31m0F0", ""]), r"rows[0] must be a string of actions, got '\x1b[31m0F0'"),
    (content(rows=["\ud8000F0", ""]), r"rows[0] must be a string of actions, got '\ud8000F0'"),
    (content(rows=["0F0 0F1 0B0 0B1", "1F0 1F01"]), "rows[1], position 1: an action must be"),
    (content(rows=["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1COPY_F0"]), "P002"),
    (content(rows=["0F0 0F1 0B0 0B1", "1B0 1F0 1B1 1F1"]), "P006"),
    (content(overlaps=[[0]]), "overlaps must hold a list for each of 2 rows, got 1"),
    (
        content(overlaps=[[3], []]),
        "stay in a row of 4, got position 3",
    ),
    (content(overlaps=[[0], []]), "P009"),
    (content(costs=1), "costs must be an object, got 1"),
    (content(costs={"forward_ns": 1}), "costs must have the key 'backward_ns', got none"),
    (content(costs=dict.fromkeys("ab", 1)), "costs must have the key 'backward_ns', got none"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda text: text[:30])
def test_what_is_no_plan_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert isinstance(caught.value.__cause__, PlanError) == bool(re.match(r"P\d", message))


def test_json_of_any_depth_is_refused() -> None:
    text = to_json(one_f_one_b(2, 2))
    for depth in range(500, sys.getrecursionlimit() + 1):
        nested = text.replace('"num_devices": 2', f'"num_devices": {"[" * depth + "]" * depth}')
        with pytest.raises(ValueError, match=r"levels, got more|sha256 must be"):
            from_json(nested)


def test_a_repeated_key_is_found_among_many() -> None:
    keys = [*range(50_000), 49_999]
    start = time.perf_counter()
    with pytest.raises(ValueError, match="keys must occur once, got '49999' twice"):
        from_json("{" + ", ".join(f'"{key}": 0' for key in keys) + "}")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "value", [True, "1", [None], [1, "2"], [None, "2"], [1, 2, 3], {}, -1, 10**400]
)
def test_costs_are_numbers(value: object) -> None:
    costs = json.loads(to_json(one_f_one_b(2, 2), COSTS))["costs"] | {"backward_ns": value}
    with pytest.raises(ValueError, match=r"costs\.backward_ns must"):
        from_json(content(costs=costs))
    for listed in ([], [1, 1]):
        changed = costs | {"backward_ns": 1, "transfer_ns": listed}
        with pytest.raises(ValueError, match=r"costs\.transfer_ns must be one number, got \["):
            from_json(content(costs=changed))
    infinite = json.dumps(costs | {"backward_ns": -1}).replace("-1", "1e999")
    with pytest.raises(ValueError, match=r"costs\.backward_ns must .*, got inf"):
        from_json(content(costs=json.loads(infinite)).replace("Infinity", "1e999"))


@pytest.mark.parametrize("name", ["plan.json", "plan.csv"])
def test_other_things_than_small_ascii_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(FileNotFoundError):
        load_plan(path)
    path.mkdir()
    with pytest.raises(ValueError, match="path must be a regular file, got"):
        load_plan(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="path must be a regular file, got"):
        load_plan(path)
    path.unlink()
    path.write_bytes("0F0,\u0660F1".encode())
    with pytest.raises(ValueError, match=r"plan\..* must be ASCII, got byte 217 at offset 4"):
        load_plan(path)
    with path.open("wb") as file:
        file.truncate(files.MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="must have at most 16777216 bytes, got more"):
        load_plan(path)
    with pytest.raises(ValueError, match=r"must end in \.json or \.csv"):
        load_plan(path.with_suffix(".txt"))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.data())
def test_a_damaged_file_is_refused_or_a_plan(data: st.DataObject) -> None:
    values = json.loads(to_json(one_f_one_b(2, 2), COSTS))
    for _ in range(data.draw(st.integers(1, 2))):
        at: Any = values
        key = data.draw(st.sampled_from(sorted(at)))
        while isinstance(at[key], list | dict) and at[key] and data.draw(st.booleans()):
            at = at[key]
            keys = range(len(at)) if isinstance(at, list) else sorted(at)
            key = data.draw(st.sampled_from(keys))
        at[key] = data.draw(JSON_VALUES | st.sampled_from(["0F0 0B0", "1F1 1B0.1", 3, [0], []]))
    try:
        plan, costs = from_json(resealed(values))
    except ValueError:
        return
    assert from_json(to_json(plan, costs)) == (plan, costs)


@given(st.text() | JSON_VALUES.map(json.dumps))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(text)


def test_saves_to_one_path_at_once_leave_one_of_the_plans(tmp_path: Path) -> None:
    plans = [one_f_one_b(2, 2 + number) for number in range(6)]
    target = tmp_path / "plan.json"

    def write(plan: Plan) -> None:
        for _ in range(10):
            save_plan(plan, target)
            assert load_plan(target) in plans

    with ThreadPoolExecutor(len(plans)) as threads:
        list(threads.map(write, plans))
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_appears_as_it_is_looked_for_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a pipe, and the plan was written behind the other writer's."""
    ours, theirs = one_f_one_b(2, 2), one_f_one_b(2, 3)
    target = tmp_path / "plan.json"
    look = os.stat

    def stat(path: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return look(path, *arguments, **named)
        except FileNotFoundError:
            if path == target:
                monkeypatch.undo()
                save_plan(theirs, target)
            raise

    monkeypatch.setattr(os, "stat", stat)
    save_plan(ours, target)
    assert load_plan(target) == ours


def test_errors_keep_their_number_and_name_the_file(tmp_path: Path) -> None:
    plan = one_f_one_b(2, 2)
    for name in ("n" * 250 + ".json", "é" * 125 + ".json"):
        save_plan(plan, tmp_path / name)
        assert load_plan(tmp_path / name) == plan
    for target, number in (
        (tmp_path / ("n" * 251 + ".json"), errno.ENAMETOOLONG),
        (tmp_path / "nowhere" / "plan.json", errno.ENOENT),
    ):
        with pytest.raises(OSError, match=re.escape(target.name)) as caught:
            save_plan(plan, target)
        assert (caught.value.errno, caught.value.filename) == (number, str(target))


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    wrong: Any = "gpipe"
    with pytest.raises(TypeError, match="plan must be a Plan, got a str"):
        save_plan(wrong, tmp_path / "plan.json")
    with pytest.raises(TypeError, match="costs must be Costs or None, got a str"):
        save_plan(one_f_one_b(2, 2), tmp_path / "plan.json", costs=wrong)
    assert not list(tmp_path.iterdir())
