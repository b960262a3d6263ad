"""The versions of Python, torch, Triton, numpy and pykern, and how pykern was built."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from .. import _C, __version__
from .diagnosis import Fact

# As pyproject.toml says.
OLDEST_TORCH = (2, 11)


def versions(*, has_gpus: bool = False) -> Iterator[Fact]:
    """A fact for each.

    Args:
        has_gpus: whether the driver shows GPUs.
    """
    yield Fact("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield of_torch(installed("torch"))
    yield of_triton(installed("triton"), has_gpus=has_gpus)
    yield Fact("numpy", installed("numpy") or "not installed; safetensors checkpoints need it")
    yield of_core(_C.compiler, optimised=_C.optimised, nvtx=_C.nvtx_built)


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def of_torch(found: str | None) -> Fact:
    """Whether this version of torch is new enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if found is None:
        problem = f"torch is missing: pip install 'torch>={oldest}'."
        return Fact("torch", "not installed", problem, stops=True)
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < OLDEST_TORCH:
        problem = f"torch must be {oldest} or newer: pip install 'torch>={oldest}'."
        return Fact("torch", found, problem, stops=True)
    return Fact("torch", found)


def of_triton(found: str | None, *, has_gpus: bool) -> Fact:
    """Whether GPUs have the kernels of pykern.models and pykern.kernels."""
    if found is not None or not has_gpus:
        return Fact("Triton", found or "not installed; GPU kernels need it")
    problem = (
        "Kernels of pykern do not run on these GPUs: pip install 'pykern-runtime[triton]', or the "
        "version of Triton that torch asks for."
    )
    return Fact("Triton", "not installed", problem)


def of_core(compiler: str, *, optimised: bool, nvtx: bool) -> Fact:
    """How the extension of pykern was built."""
    ranges = "with NVTX" if nvtx else "without NVTX"
    value = f"{__version__}, built by {compiler} {ranges}"
    if not optimised:
        problem = "The C++ core was built without optimisation: install it again by pip install ."
        return Fact("pykern", f"{value}, not optimised", problem)
    if not nvtx:
        problem = (
            "Profilers such as Nsight see no ranges: install nvidia-nvtx, then pykern again by "
            "pip install --no-build-isolation ."
        )
        return Fact("pykern", value, problem)
    return Fact("pykern", value)
