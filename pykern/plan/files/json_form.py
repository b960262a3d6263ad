"""A plan as JSON: a header, the counts, a line of actions for each device, and a checksum.

Keys, types and ranges are exact; the reader guesses nothing and has no defaults.
"""

import hashlib
import json
from collections.abc import Collection
from math import nan
from sys import float_info
from typing import Any

from pykern._C import MAX_CELLS, Action, Costs, Placement, Plan, check
from pykern.plan.costs import COSTS, STAGE_COSTS, TIMES
from pykern.plan.files.proved import MAX_ACTIONS, proved_plan, require_count
from pykern.plan.files.strict_json import read_json, shown

FORMAT = "pykern-plan"
VERSION = 1
# A plan has at most half as many pairs as actions, and at most as many devices of stages.
MAX_VALUES = 2 * MAX_ACTIONS

# The keys in the order in which they are written. Only the costs may be left out.
KEYS = (
    "format",
    "version",
    "num_devices",
    "num_stages",
    "num_microbatches",
    "num_slices",
    "replicas",
    "rows",
    "overlaps",
    "costs",
    "sha256",
)
Content = dict[str, Any]


def to_json(plan: Plan, costs: Costs | None = None) -> str:
    """The plan as readable text; a small change of the plan changes few lines.

    Args:
        plan: A plan that passes `check`.
        costs: The costs that the plan was made for.

    Returns:
        ASCII text, which `from_json` reads back as equal values.

    Raises:
        PlanError: The plan breaks a rule.
        ValueError: The costs are of another number of stages or devices.
    """
    check(plan)
    content: Content = {
        "format": FORMAT,
        "version": VERSION,
        "num_devices": plan.num_devices,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "num_slices": plan.num_slices,
        "replicas": plan.placement.replicas,
        "rows": [" ".join(map(str, row)) for row in plan.rows],
        "overlaps": plan.overlaps,
    }
    if costs is not None:
        content["costs"] = {name: or_none(getattr(costs, name)) for name in COSTS}
        costs_of(content["costs"], plan)
    content["sha256"] = checksum(content)
    lines = [f"  {json.dumps(key)}: {laid_out(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def or_none(value: Any) -> Any:
    """The value, or None for an unknown time (NaN) and for infinity, both of which JSON lacks."""
    if isinstance(value, list):
        return [or_none(each) for each in value]
    return value if value <= float_info.max else None


def nan_for_none(times: Any) -> Any:
    """The times with NaN for None."""
    if isinstance(times, list):
        return [nan if time is None else time for time in times]
    return nan if times is None else times


def laid_out(value: Any) -> str:
    """A list with a line for each item, anything else on one line."""
    if not isinstance(value, list | tuple):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"


def checksum(content: Content) -> str:
    """SHA-256 over the values, independent of the layout of the text."""
    values = {key: value for key, value in content.items() if key != "sha256"}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def from_json(text: str) -> tuple[Plan, Costs | None]:
    """The plan that the text holds, and its costs if it has them.

    Args:
        text: Text as `to_json` writes it; layout and order of keys may differ.

    Returns:
        The checked plan, and its costs.

    Raises:
        ValueError: The text does not hold a plan; the message names the key and the value.
        PlanError: The plan breaks a rule.
    """
    content = read_json(text, max_values=MAX_VALUES)
    require_object("a plan", content, FORMAT, VERSION, KEYS, optional=("costs",))
    require_lengths(content)
    require_equal("sha256", content["sha256"], checksum(content))
    replicas = [
        int_list(f"replicas[{index}]", replica)
        for index, replica in enumerate(list_of("replicas", content["replicas"]))
    ]
    placement = Placement.replicated(count(content, "num_devices"), replicas)
    require_equal("num_stages", count(content, "num_stages"), placement.num_stages)
    rows = list_of("rows", content["rows"])
    overlaps = list_of("overlaps", content["overlaps"])
    plan = proved_plan(
        placement,
        count(content, "num_microbatches"),
        [actions_of(f"rows[{index}]", row) for index, row in enumerate(rows)],
        count(content, "num_slices"),
        [int_list(f"overlaps[{index}]", row) for index, row in enumerate(overlaps)],
    )
    costs = costs_of(content["costs"], plan) if "costs" in content else None
    return plan, costs


def require_object(
    what: str,
    content: object,
    form: str,
    version: int,
    keys: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """Refuses all but an object of this format and version, with these keys."""
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a JSON object, got {shown(content)}")
    require_equal("format", content.get("format"), form)
    require_equal("version", content.get("version"), version)
    require_keys(what, content, required=set(keys) - set(optional), allowed=set(keys))


def require_lengths(content: Content) -> None:
    """Refuses too many rows or actions early, because all other checks take longer."""
    num_devices = count(content, "num_devices")
    rows = list_of("rows", content["rows"])
    for name, lists in ("rows", rows), ("overlaps", list_of("overlaps", content["overlaps"])):
        if len(lists) > num_devices:
            raise ValueError(f"{name} must be {num_devices}, one for each device, got {len(lists)}")
    num_spaces = sum(row.count(" ") for row in rows if isinstance(row, str))
    require_count("actions", num_spaces, MAX_ACTIONS)


def require_keys(what: str, content: Content, required: set[str], allowed: set[str]) -> None:
    """Refuses missing and unknown keys."""
    if missing := sorted(required - content.keys()):
        raise ValueError(f"{what} must have the key {shown(missing[0])}, got none")
    if unknown := sorted(content.keys() - allowed):
        raise ValueError(f"{what} must have known keys only, got {shown(unknown[0])}")


def require_equal(key: str, value: object, expected: object) -> None:
    """Refuses another value, or an equal value of another type."""
    if type(value) is not type(expected) or value != expected:
        raise ValueError(f"{key} must be {shown(expected)}, got {shown(value)}")


def count(content: Content, key: str) -> int:
    """A whole number of at least one."""
    return whole(key, content[key], 1)


def whole(where: str, value: object, least: int) -> int:
    """An int in the range of counts and indices."""
    if type(value) is not int or not least <= value <= MAX_CELLS:
        raise ValueError(f"{where} must be an int from {least} to {MAX_CELLS}, got {shown(value)}")
    return value


def list_of(where: str, value: object) -> list[Any]:
    """A list, of anything."""
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, got {shown(value)}")
    return value


def int_list(where: str, value: object) -> list[int]:
    """A list of ints in range."""
    return [whole(f"{where}[{i}]", item, 0) for i, item in enumerate(list_of(where, value))]


def actions_of(where: str, value: object) -> list[Action]:
    """A row: actions with one space between them."""
    # Terminal control characters must not reach a message, nor a lone surrogate the C++ core.
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{where} must be a string of actions, got {shown(value)}")
    actions = []
    for position, word in enumerate(value.split(" ") if value else []):
        try:
            actions.append(Action.parse(word))
        except ValueError as error:
            raise ValueError(f"{where}, position {position}: {error}") from error
    return actions


def costs_of(value: object, plan: Plan) -> Costs:
    """The costs for that plan; ranges that differ between costs are checked by the C++ core."""
    if not isinstance(value, dict):
        raise ValueError(f"costs must be an object, got {shown(value)}")
    require_keys("costs", value, required=set(COSTS), allowed=set(COSTS))
    lengths = dict.fromkeys(STAGE_COSTS, plan.num_stages) | {"device_speeds": plan.num_devices}
    for name, given in value.items():
        if name == "shared_links":
            if not isinstance(given, bool):
                raise ValueError(f"costs.shared_links must be true or false, got {shown(given)}")
        elif name in TIMES:
            require_numbers(f"costs.{name}", given, plan.num_stages, or_null=True)
        elif name != "bandwidth" or given is not None:
            require_numbers(f"costs.{name}", given, lengths.get(name))
    values = {
        name: nan_for_none(given) if name in TIMES else given for name, given in value.items()
    }
    return Costs(**{name: given for name, given in values.items() if given is not None})


def require_numbers(
    where: str, value: object, length: int | None, *, or_null: bool = False
) -> None:
    """Refuses anything but a number, or a list of `length` numbers if a length is given."""
    if isinstance(value, list) and len(value) != length:
        either = f" or a list of {length}" if length else ""
        raise ValueError(f"{where} must be one number{either}, got {shown(value)}")
    items = value if isinstance(value, list) else [value]
    if not all(is_number(item) or (or_null and item is None) for item in items):
        raise ValueError(f"{where} must be finite and at least 0, got {shown(value)}")


def is_number(value: object) -> bool:
    """Whether it is a number from 0 to the largest float; True does not count as a number."""
    return type(value) in (int, float) and 0 <= value <= float_info.max  # type: ignore[operator]
