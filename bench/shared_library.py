"""Shared libraries of C++ for ctypes, as CMake links the extension: without names of libstdc++."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Some toolchains link libstdc++ statically, and a name of it that is exported takes the place of
# torch's, or is taken for it: numbers are then written by a locale of another version.
EXPORTS = ROOT / "cmake/exports.map"


def compiler() -> list[str]:
    """The command of the compiler, which CXX names."""
    return shlex.split(os.environ.get("CXX", "c++"))


def compile_library(sources: Iterable[Path], library: Path, optimize: str = "-O1") -> None:
    """Compiles sources, which may include headers of the core, as one unit.

    Raises:
        CalledProcessError: they do not compile.
    """
    # One unit takes a third of the time of many.
    unit = "".join(f'#include "{source}"\n' for source in sources)
    flags = ["-std=c++20", optimize, "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    exports = f"-Wl,--version-script={EXPORTS}"
    unfinished = library.with_suffix(".unfinished")
    subprocess.run(
        [*compiler(), *flags, exports, "-x", "c++", "-", "-o", unfinished],
        input=unit,
        text=True,
        check=True,
    )
    unfinished.rename(library)
