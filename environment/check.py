"""Says in one line each what this machine lacks to build pykern, before anything is downloaded.

Called by make with the command of the C++ compiler. It is read by any Python 3.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# The minimal size of .venv with a torch without CUDA, and with a torch with CUDA libraries.
LEAST_GB = 3
CUDA_GB = 7
PROGRAM = "static_assert(__cplusplus >= 202002L); int main() {}"


def old_python():
    """A line where this Python is too old."""
    if sys.version_info >= (3, 11):
        return None
    version = ".".join(map(str, sys.version_info[:3]))
    return (
        "pykern needs Python 3.11 or newer, and {} is {}. Name another: make PYTHON=python3.13"
    ).format(sys.executable, version)


def no_venv():
    """A line where Python comes without what makes virtual environments."""
    try:
        import ensurepip  # noqa: F401, PLC0415 - whether they are there is the question
        import venv  # noqa: F401, PLC0415
    except ImportError:
        return (
            "pykern needs Python's modules venv and ensurepip (Debian: the package python3-venv)."
        )
    return None


def no_headers():
    """A line where Python's C headers are missing."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        return None
    return "pykern needs Python's headers, {} is missing (Debian: the package python3-dev).".format(
        header
    )


def no_compiler(command):
    """A line where the command does not compile C++20."""
    remedy = "(Debian: the package g++). Name another: make CXX=g++-13"
    try:
        done = subprocess.run(
            [*command.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
            input=PROGRAM.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return "pykern needs a C++20 compiler, and '{}' cannot be started {}".format(
            command, remedy
        )
    if done.returncode != 0:
        return (
            "pykern needs a C++20 compiler (GCC 11, Clang 14 or newer), and '{}' is older {}"
        ).format(command, remedy)
    return None


def no_room(folder="."):
    """A line where the smallest environment does not fit."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb >= LEAST_GB:
        return None
    return (
        "pykern's environment takes {} to {} GB, and {} has {:.1f} GB free. Make room there."
    ).format(LEAST_GB, CUDA_GB, Path(folder).resolve(), free_gb)


def main(compiler):
    """Prints a line for each thing that is missing; returns the exit status."""
    lines = [old_python(), no_venv(), no_headers(), no_compiler(compiler), no_room()]
    missing = [line for line in lines if line is not None]
    for line in missing:
        print(line, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
