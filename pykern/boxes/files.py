"""Profiles of boxes as files of JSON, and those that come with pykern."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..one_of import require_one_of
from ..plan.files import read_bytes, write_text
from ..plan.files.strict_json import decoded, read_json, shown
from ..plan.files.typed_json import from_text
from .box import VERSION, Box

_PUBLISHED = Path(__file__).with_name("published")
_OLDER = 2
# Such as 4x4090.
_COUNTED = re.compile(r"([0-9]{1,3})x([a-z0-9]+)")


def published() -> list[str]:
    """The names of the profiles that come with pykern, from published figures."""
    return sorted(path.stem for path in _PUBLISHED.glob("*.json"))


def load(file_or_name: str | os.PathLike[str]) -> Box:
    """A profile.

    Args:
        file_or_name: a file; or the name of a profile that comes with pykern; or "4x4090", for the
            first four devices of the profile that has 4090 in its name.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such name, or the file is not a profile; the message names the key.
    """
    path = Path(file_or_name)
    # A name is a word, a file has a folder or an end.
    if os.fspath(file_or_name) == path.stem and not path.is_file():
        if (counted := _COUNTED.fullmatch(path.stem)) is not None:
            return load(_with(counted[2])).first(int(counted[1]))
        require_one_of("box", path.stem, published())
        path = _PUBLISHED / f"{path.stem}.json"
    try:
        text = decoded(read_bytes(path))
        content = read_json(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version == _OLDER:
            text = json.dumps(_as_now(content))
        elif version != VERSION:
            raise ValueError(f"version must be {VERSION}, got {shown(version)}")
        return from_text(Box, text)
    except ValueError as error:
        raise ValueError(
            f"{path.name} must be the profile of a box, got another file: {error}. Write one with "
            "pykern topo --json"
        ) from error


def _as_now(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of version 2, which lacks rates by size and NUMA nodes."""
    added: dict[str, dict[str, Any]] = {
        "devices": {"numa_node": None, "from_host": [], "to_host": []},
        "links": {"by_size": [], "copy_slows": None},
    }
    for key, values in added.items():
        parts = content.get(key)
        if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
            content[key] = [values | part for part in parts]
    return content | {"version": VERSION}


def _with(device: str) -> str:
    """The name of the profile that comes with pykern and has such devices, as rtx4090 or 4090."""
    names = {name.rpartition("x")[0]: name for name in published()}
    names |= {known.removeprefix("rtx"): name for known, name in names.items()}
    require_one_of("device of the box", device, names)
    return names[device]


def save(box: Box, file: str | os.PathLike[str]) -> None:
    """Writes a profile, which `load` reads.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(Path(file), json.dumps(asdict(box), indent=2) + "\n")
