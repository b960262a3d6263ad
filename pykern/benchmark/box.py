"""Runs the sections until the time is up."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..cgroup import usable_cores
from ..doctor.versions import versions
from ..runtime.devices import parse_devices
from .figures import BoxResults, CannotRunHere, Figure
from .sections import SECTIONS


def run(
    devices: str,
    seconds: float,
    tell: Callable[[str, float], object] = lambda *_: None,
    failed: Callable[[str, Exception], object] = lambda *_: None,
) -> BoxResults:
    """Measures a box. An interrupt ends the run, with what is known by then.

    Args:
        devices: as for `Pipeline`, such as "cpu:2" or "cuda".
        seconds: when these are over, no further section begins, and the one that runs ends behind
            its next figure.
        tell: called with the section that begins, and the share of the time that is over.
        failed: called with a section that fails, and its error. The results have the error's type
            alone, since its text may name users and folders.
    """
    num_devices = len(parse_devices(devices))
    start = time.monotonic()
    figures: list[Figure] = []
    left_out: dict[str, str] = {}
    reason = ""
    for name, section in SECTIONS.items():
        if reason:
            left_out[name] = reason
            continue
        tell(name, min(1.0, (time.monotonic() - start) / seconds))
        try:
            for number, figure in enumerate(section(devices, num_devices), 1):
                figures.append(figure)
                if time.monotonic() - start > seconds:
                    reason = "the time was over"
                    left_out[name] = f"all behind its figure {number}, since {reason}"
                    break
        except KeyboardInterrupt:
            reason = left_out[name] = "interrupted"
        except CannotRunHere as error:
            left_out[name] = str(error)
        # The other sections tell of this box all the same.
        except Exception as error:
            left_out[name] = type(error).__name__
            failed(name, error)
    return BoxResults(dict(_machine(devices)), tuple(figures), left_out)


def _machine(devices: str) -> Iterator[tuple[str, str]]:
    yield "date", datetime.now(UTC).strftime("%Y-%m-%d")
    yield "devices", devices
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "processor", processor()
    yield "cores", str(usable_cores())
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        yield "GPUs", ", ".join(names)
    for fact in versions():
        yield fact.name, fact.value


def processor() -> str:
    """Name, family and model, since virtual machines often hide a part of the name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    keys = ("model name", "cpu family", "model")
    found = [re.search(rf"^{key}\s*: (.*)$", text, re.M) for key in keys]
    name, family, model = [match[1] if match else "unknown" for match in found]
    return f"{name} (family {family}, model {model})"
