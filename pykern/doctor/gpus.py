"""The CUDA driver as pykern's core finds it: devices, peer access, and whether torch can use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import _C
from ..columns import counted
from .diagnosis import Fact


def gpus(torch_cuda: str | None) -> Iterator[Fact]:
    """Facts about the driver and its devices.

    Args:
        torch_cuda: the release of CUDA that torch is built for; None if it is built without.
    """
    try:
        served, devices = _C.cuda_version(), _C.cuda_devices()
    except _C.CudaError as error:
        problem = "The CUDA driver fails: reload the driver, or restart the machine or container."
        yield Fact("CUDA driver", f"{error}", problem, stops=True)
        return
    except RuntimeError as error:
        yield Fact("CUDA driver", f"{error}; pipelines run on CPU workers")
        return
    yield of_driver(served, torch_cuda, len(devices))
    for number, (name, num_sms) in enumerate(devices):
        yield Fact(f"cuda:{number}", f"{name}, {num_sms} multiprocessors")
    if len(devices) > 1:
        yield of_peers(len(devices))
        if torch_cuda is not None and served_to_torch():
            yield of_bytes(changed_pairs(len(devices)))


def has_gpus() -> bool:
    """Whether the driver shows any device."""
    try:
        return bool(_C.cuda_devices())
    except RuntimeError:
        return False


def served_to_torch() -> bool:
    """Whether torch can use the devices."""
    import torch  # noqa: PLC0415 - it may be missing

    return torch.cuda.is_available()


def changed_pairs(num_devices: int) -> list[str]:
    """The pairs of devices between which torch's copies do not arrive as they were sent."""
    import torch  # noqa: PLC0415 - it may be missing

    from ..runtime.gpu.peers import pattern_of  # noqa: PLC0415 - needs torch

    changed = []
    for sender in range(num_devices):
        sent = pattern_of(sender)
        there = sent.to(f"cuda:{sender}")
        for receiver in range(num_devices):
            if receiver != sender and not torch.equal(there.to(f"cuda:{receiver}").cpu(), sent):
                changed.append(f"{sender} to {receiver}")
    return changed


def of_bytes(changed: Sequence[str]) -> Fact:
    """Whether bytes arrive: some boards and IOMMUs change them without an error."""
    name = "bytes between devices"
    if not changed:
        return Fact(name, "arrive as they were sent")
    problem = (
        "Direct copies change bytes, which pykern avoids and torch does not: disable the IOMMU or "
        "ACS in the BIOS."
    )
    return Fact(name, f"CHANGED from {', '.join(changed)}", problem)


def of_driver(served: str, torch_cuda: str | None, num_devices: int) -> Fact:
    """Whether torch can use the driver."""
    value = f"CUDA {served}, {counted(num_devices, 'device')}"
    problem = ""
    if num_devices and torch_cuda is None:
        problem = "torch is built without CUDA: install a torch for CUDA to use these GPUs."
    elif num_devices and torch_cuda is not None and _numbers(torch_cuda) > _numbers(served):
        problem = (
            f"torch is built for CUDA {torch_cuda}: update the driver, or take an older torch."
        )
    elif not num_devices:
        problem = "The driver shows no device: check CUDA_VISIBLE_DEVICES."
    return Fact("CUDA driver", value, problem, stops=bool(num_devices and problem))


def of_peers(num_devices: int) -> Fact:
    """The pairs of devices that copy straight to each other."""
    pairs = [(one, other) for one in range(num_devices) for other in range(one)]
    apart = [
        f"{other}-{one}"
        for one, other in pairs
        if not (_C.cuda_can_access_peer(one, other) and _C.cuda_can_access_peer(other, one))
    ]
    value = f"{len(pairs) - len(apart)} of {len(pairs)} pairs of devices"
    if not apart:
        return Fact("peer access", value)
    problem = (
        f"Copies between devices {', '.join(apart)} go through host memory: put stages that "
        "exchange data on other pairs, or allow peer access in the BIOS (IOMMU, ACS)."
    )
    return Fact("peer access", value, problem)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
