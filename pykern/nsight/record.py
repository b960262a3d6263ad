"""Records a script with Nsight Systems: its ranges, and its work on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..replacing import require_folder
from ..script import require_script
from .export import command_of, import_recording

_SUFFIX = ".nsys-rep"


def record(report: str | os.PathLike[str], script: Sequence[str], seconds: int = 60) -> None:
    """Runs a Python script, and records its steps.

    Args:
        report: the report to write, whose name ends in `.nsys-rep`.
        script: the script and its arguments.
        seconds: the time after which the script is ended.

    Raises:
        ValueError: the name has another end, there is such a file, its folder is not there or may
            not be written to, `nsys` is not installed, or it records nothing.
    """
    path = Path(report)
    if path.suffix != _SUFFIX:
        raise ValueError(f"report must end in {_SUFFIX}, got {path.name}. Name it step{_SUFFIX}")
    if path.exists():
        raise ValueError(f"report must be a new file, got {path.name}, which exists. Remove it")
    require_folder("report", path)
    require_script(script[0])
    nsys = command_of("Run the script without it: pipe.profile needs no other tool")
    # Imported here, because reading a report needs no torch.
    import torch  # noqa: PLC0415

    traced = "nvtx,cuda" if torch.cuda.is_available() else "nvtx"
    with TemporaryDirectory(dir=path.absolute().parent) as folder:
        # Samples of call stacks would be most of the report, and nothing here reads them.
        command = [nsys, "profile", f"--trace={traced}", "--sample=none", "--cpuctxsw=none"]
        command += [f"--duration={seconds}", "--kill=sigterm", f"--output={folder}/report"]
        done = subprocess.run([*command, sys.executable, *script], check=False)
        found = [Path(folder, f"report{end}") for end in (_SUFFIX, ".qdstrm")]
        made = next((one for one in found if one.exists()), None)
        if made is None:
            raise ValueError(
                f"nsys must leave a recording of {script[0]}, got exit code {done.returncode} and "
                "no recording. See its own message above"
            )
        if made.suffix == _SUFFIX:
            shutil.move(made, path)
        else:
            import_recording(made, path)
