"""Measurements in a file, so that tuning goes on where it was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..plan.files import read_text, write_text
from ..replacing import require_folder
from ..user_code import warn
from .asked import Asked
from .held import levels_for, levels_in
from .measure import bytes_held, measure, sizes_to_measure, weights_of
from .measurements import Measurements
from .progress import Tell


def measured_once(asked: Asked, path: Path | None, tell: Tell) -> Measurements:
    """Reads the measurements from the file, or takes them now and writes them there.

    A file that cannot be written then, as on a full disk, is a warning: measurements take minutes.

    Raises:
        ValueError: the file has other measurements, or has to be written in a folder that does not
            exist or may not be written to.
        OSError: it cannot be read.
    """
    if path is None:
        return measure(asked, tell)
    if path.exists():
        found = Measurements.from_json(read_text(path))
        # A memory that is too small for larger sizes had these left out.
        sizes = sizes_to_measure(asked)[: len(found.rows)]
        needed = asked.subject, asked.units.names, sizes, asked.num_cores
        if (found.subject, found.units, found.rows, found.cores) != needed:
            raise ValueError(
                f"resume must be a file of the same model, batch size and devices, got {path}, "
                "which has other measurements. Name another file"
            )
        # The optimizer may be another, which changes no time.
        found = replace(found, weights=weights_of(asked))
        if not set(levels_for(asked)) <= set(levels_in(found)):
            # No memory was given before.
            require_folder("resume", path)
            found = replace(found, sizes=bytes_held(asked, found.rows))
            _keep(path, found)
        return found
    require_folder("resume", path)
    measured = measure(asked, tell)
    _keep(path, measured)
    return measured


def _keep(path: Path, measured: Measurements) -> None:
    try:
        write_text(path, measured.to_json())
    except OSError as error:
        warn(
            f"measurements were not kept in {path}: {error.strerror}. Tuning goes on with them; "
            "save the choice elsewhere"
        )
