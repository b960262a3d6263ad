"""The events of a trace that torch.profiler has written for Chrome."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan.files.strict_json import decoded, parsed, shown, whole

_GZIP = b"\x1f\x8b"
# The limit is of text: a compressed file may say anything about its size.
_MOST_BYTES = 2 << 30
# Some traces count from 1970.
_MOST_US = 1e18


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event with a beginning and an end.

    Attributes:
        category: its category, such as `kernel`.
        name: its name.
        process: the number of its process; of work on a GPU, the number of the GPU.
        thread: the number of its thread; of work on a GPU, its stream.
        start_ns: when it began; all times of a trace have one origin.
        end_ns: when it ended.
        correlation: the number that work on a GPU has in common with the call that issued it.
        external: the number that it has in common with the range of the host around the call.
    """

    category: str
    name: str
    process: object
    thread: object
    start_ns: int
    end_ns: int
    correlation: int | None
    external: int | None


def events_of(path: str | os.PathLike[str]) -> list[TraceEvent]:
    """The events of a trace that have a duration.

    Args:
        path: a trace by `export_chrome_trace`, compressed by gzip or not.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such a trace.
    """
    try:
        found = parsed(_text(Path(path)), parse_int=whole)
        entries = found.get("traceEvents") if isinstance(found, Mapping) else None
        if not isinstance(entries, list):
            raise ValueError(
                "traceEvents must be a list in an object, got something else. Export it anew"
            )
        return list(_complete(entries))
    except ValueError as error:
        told: object = error
    except KeyError as error:
        told = f"an event lacks {error}"
    except RecursionError:
        told = "its lists and objects have too many levels"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        told = "its compressed text is cut off or changed"
    raise ValueError(
        f"the file must be a trace by torch.profiler's export_chrome_trace, got "
        f"{os.fspath(path)}: {told}"
    )


def _text(path: Path) -> str:
    with path.open("rb") as file:
        # A pipe cannot be read twice.
        zipped = file.peek(len(_GZIP)).startswith(_GZIP)
        text = (gzip.GzipFile(fileobj=file) if zipped else file).read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError("its text must be at most 2 GiB, got more. Record fewer steps")
    return decoded(text)


def _complete(entries: list[Any]) -> Iterator[TraceEvent]:
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"an event must be an object, got a {type(entry).__name__}. Export it anew"
            )
        # Flows, names of threads and marks have no duration.
        if entry.get("ph") == "X":
            start, duration = _us(entry, "ts"), _us(entry, "dur", least=0)
            yield TraceEvent(
                str(entry.get("cat")),
                str(entry["name"]),
                entry["pid"],
                entry.get("tid"),
                round(start * 1e3),
                round((start + duration) * 1e3),
                _argument(entry, "correlation"),
                _argument(entry, "External id"),
            )


def _us(entry: Mapping[str, Any], key: str, least: float = -_MOST_US) -> float:
    us = entry[key]
    if isinstance(us, bool) or not isinstance(us, int | float) or not least <= us <= _MOST_US:
        rule = "up to 1e18" if least else "from 0 up to 1e18"
        raise ValueError(
            f"{key} of event {shown(entry.get('name'))} must be a number {rule}, got "
            f"{shown(us)}. Export it anew"
        )
    return float(us)


def _argument(entry: Mapping[str, Any], name: str) -> int | None:
    arguments = entry.get("args")
    found = arguments.get(name) if isinstance(arguments, Mapping) else None
    return found if isinstance(found, int) else None
