"""The tables of a report of Nsight Systems, which its own command writes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# The importer's folder beside the command or above it, as NVIDIA's and Debian's packages have it.
_IMPORTERS = "host-linux-*/QdstrmImporter"
_SQLITE = b"SQLite format 3\0"


@contextmanager
def tables_of(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """The tables of a report.

    Args:
        path: a `.sqlite` export, a `.nsys-rep` report, or a `.qdstrm` recording. All but exports
            need the command `nsys`; a recording needs its importer as well.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a report, or Nsight Systems cannot read it.
    """
    report = Path(path)
    with report.open("rb") as file:
        is_export = file.read(len(_SQLITE)) == _SQLITE
    if report.suffix == ".sqlite" and not is_export:
        raise ValueError(
            f"the report must be an export of Nsight Systems, got {report.name}, which is "
            "not an SQLite file. Export it anew: nsys export --type sqlite"
        )
    with TemporaryDirectory() as folder:
        export = report if is_export else _exported(report, Path(folder))
        # As a URI, so that reading changes nothing.
        with closing(sqlite3.connect(f"{export.absolute().as_uri()}?mode=ro", uri=True)) as tables:
            yield tables


def _exported(report: Path, folder: Path) -> Path:
    nsys = command_of("Export the report elsewhere: nsys export --type sqlite")
    if report.suffix == ".qdstrm":
        recording, report = report, folder / "report.nsys-rep"
        import_recording(recording, report)
    export = folder / "report.sqlite"
    _run([nsys, "export", "--type", "sqlite", "--output", export, report], report)
    return export


def command_of(otherwise: str) -> str:
    """The command `nsys`.

    Raises:
        ValueError: it is not installed. `otherwise` is what helps besides.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ValueError(
            f"nsys must be on the PATH, got no such command. Install Nsight Systems. {otherwise}"
        )
    return nsys


def import_recording(recording: Path, report: Path) -> None:
    """Makes a report of a recording, which `nsys` leaves where it does not find its importer."""
    _run([_importer(), "-i", recording, "-o", report], recording)


def _importer() -> Path:
    nsys = Path(command_of("Import the recording elsewhere"))
    for home in [*nsys.resolve().parents, Path("/usr/lib/nsight-systems")]:
        found = next(home.glob(_IMPORTERS), None)
        if found is not None:
            return found
    raise ValueError(
        "QdstrmImporter must be installed to read a .qdstrm recording, got an Nsight Systems "
        "without it. Install the whole package, or import the recording elsewhere"
    )


def _run(command: list[str | Path], report: Path) -> None:
    # A file's name, which the command repeats, may be of another locale.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(
            f"the report must be one that Nsight Systems can read, got {report.name}: "
            f"{told[-1] if told else f'exit code {done.returncode}'}. Record it anew, or use the "
            "version of nsys that recorded it"
        )
