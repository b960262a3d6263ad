"""A tuned pipeline as a file: what `pykern.tune` has chosen for a model, and a `Pipeline` takes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..partition.chain import max_stages
from ..plan import Plan
from ..plan.files import read_text, write_text
from ..plan.files.json_form import from_json, require_object, to_json
from ..plan.files.strict_json import read_json
from .choose_levels import Levels

FORMAT = "pykern-tuned"
VERSION = 1
_KEYS = ("format", "version", "num_layers", "devices", "split_at", "recompute", "plan")
# The arguments of `Pipeline` that a file stands for, with what they are when they are left out.
STANDS_FOR: Mapping[str, Any] = {
    "schedule": "one_f_one_b",
    "microbatches": None,
    "replicas": 1,
    "balance": None,
    "split_at": None,
    "recompute": None,
}


@dataclass(frozen=True)
class Tuned:
    """The contents of the file.

    Attributes:
        num_layers: the number of layers of the model, as `max_stages` counts them.
        devices: the name of each device.
        split_at: the names of the layers that stages begin with, except the first stage.
        recompute: the levels by stage and microbatch; None if nothing is recomputed.
        plan: the plan of a step.
    """

    num_layers: int
    devices: Sequence[str]
    split_at: Sequence[str]
    recompute: Levels | None
    plan: Plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "num_layers": self.num_layers,
            "devices": list(self.devices),
            "split_at": list(self.split_at),
            "recompute": self.recompute,
            "plan": json.loads(to_json(self.plan)),
        }
        write_text(Path(path), json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuned:
        """Reads what `save` has written.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            content = read_json(read_text(Path(path)))
            require_object("the file", content, FORMAT, VERSION, _KEYS)
            _require_values(content)
            plan, _ = from_json(json.dumps(content["plan"]))
        except ValueError as error:
            raise ValueError(
                f"tuned must be a file that pykern.tune's Choice.save has written, got {path}: "
                f"{error}"
            ) from None
        return cls(**{key: content[key] for key in _KEYS[2:-1]}, plan=plan)


def with_tuned(
    tuned: str | os.PathLike[str] | None, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of a `Pipeline`, with those that the file stands for.

    Args:
        tuned: the file; None without one.
        arguments: all others, by name.

    Raises:
        TypeError: `tuned` is not a path.
        ValueError: the file is not one, an argument is given that it stands for, or it is for
            another model.
    """
    if tuned is None:
        return arguments
    if not isinstance(tuned, str | os.PathLike):
        raise TypeError(
            f"tuned must be the path of a file, got a {type(tuned).__name__}. Give the file that "
            "Choice.save has written"
        )
    found = Tuned.load(tuned)
    for name, usual in STANDS_FOR.items():
        if arguments[name] is not usual and arguments[name] != usual:
            raise ValueError(
                f"{name} must be left out beside tuned=, got {arguments[name]!r}. The file says it"
            )
    _require_fits(found, arguments["model"], tuned)
    devices = arguments["devices"]
    return {
        **arguments,
        "devices": found.devices if devices is None else devices,
        "schedule": found.plan,
        "split_at": found.split_at,
        "recompute": found.recompute,
    }


def _require_values(content: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that no choice has."""
    rules = {
        "num_layers": ("a whole number", type(content["num_layers"]) is int),
        "devices": ("a list of names", _are_names(content["devices"])),
        "split_at": ("a list of names", _are_names(content["split_at"])),
        "recompute": ("null or, by stage, a list of levels", _are_levels(content["recompute"])),
    }
    for name, (rule, holds) in rules.items():
        if not holds:
            got = json.dumps(content[name])[:80]
            raise ValueError(f"{name} must be {rule}, got {got}. Save the choice again")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_levels(value: Any) -> bool:
    if value is None:
        return True
    if not (isinstance(value, list) and all(isinstance(of_stage, list) for of_stage in value)):
        return False
    return all(level is None or isinstance(level, str) for of_stage in value for level in of_stage)


def _require_fits(
    found: Tuned, model: nn.Module | Sequence[nn.Module], tuned: str | os.PathLike[str]
) -> None:
    num_layers = max_stages(model)
    if num_layers != found.num_layers:
        raise ValueError(
            f"tuned must be for a model of {num_layers} layers, got {tuned}, which is for "
            f"{found.num_layers}. Tune this model"
        )
