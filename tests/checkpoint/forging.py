"""Files as strangers might make them: an index of their own under a valid checksum."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pykern.plan.files.json_form import checksum

Index = dict[str, Any]


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header before the tensors' bytes, and these."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def forge_text(file: Path, change: Callable[[str], str]) -> None:
    """Replaces the text of the index."""
    header, data = header_of(file)
    header["__metadata__"]["pykern"] = change(header["__metadata__"]["pykern"])
    write(file, header, data)


def forge(file: Path, change: Callable[[Index], object]) -> None:
    """Changes the index, and makes its checksum right."""

    def changed(text: str) -> str:
        index = json.loads(text)
        change(index)
        index["sha256"] = checksum(index)
        # Python reads this as infinite, but JSON has no word for that.
        return json.dumps(index).replace("Infinity", "1e999")

    forge_text(file, changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a value, with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])
