"""Agreement: checks that processes that work together have been given the same things."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...partition.balance import Partition
from ...plan import Plan
from ...plan.files.json_form import to_json
from ...plan.files.typed_json import from_text, to_text
from ...tensors.dtensor import local
from ...tensors.parameters import gradient_dtype
from .errors import PeerError, understanding
from .groups import control_group, give_back
from .texts import texts_of_all


def require_alike(group: ProcessGroup, told: Mapping[str, str]) -> None:
    """Makes all processes of a gloo group compare the texts that describe their arguments.

    Args:
        group: a group for tensors on the CPU.
        told: the texts that have to be equal, by the name of the thing they describe.

    Raises:
        PeerError: texts differ, or a process sent another kind of message; raised in all processes.
        RuntimeError: a process is gone, or has not come in time.
    """
    texts = texts_of_all(to_text(told), group)
    everybodys = [_read(text, rank) for rank, text in enumerate(texts)]
    first = everybodys[0]
    for rank, other in enumerate(everybodys):
        different = [what for what in first | other if first.get(what) != other.get(what)]
        if different:
            what = different[0]
            raise PeerError(
                "pipelines must be alike in all processes of the group, got ones that differ in "
                f"{', '.join(different)}: {what} is {first.get(what)} in process 0 and "
                f"{other.get(what)} in process {rank}"
            )


def _read(text: str, rank: int) -> dict[str, str]:
    with understanding(f"process {rank}"):
        return from_text(dict[str, str], text)


def agreed_group(group: ProcessGroup, told: Mapping[str, str]) -> ProcessGroup:
    """A control group of the same processes, after checking that the processes agree.

    Raises:
        PeerError, RuntimeError: as `require_alike`; the control group is then given back.
    """
    control = control_group(group)
    try:
        require_alike(control, told)
    except BaseException:
        give_back([control])
        raise
    return control


def alike(plan: Plan, cut: Partition, model: nn.Module) -> dict[str, str]:
    """The texts that must be equal in all processes whose pipelines train one model."""
    kinds = [
        f"{name} {tuple(p.shape)} {p.dtype} {gradient_dtype(p)}"
        for name, p in model.named_parameters()
    ]
    return {
        "torch": torch.__version__,
        "the plan": f"{plan.num_microbatches} microbatches on {plan.num_devices} devices, "
        f"{digest_of([to_json(plan)])}",
        "the stages": str([(span.start, span.stop) for span in cut.stages]),
        "the parameters": f"{len(kinds)}, {digest_of(kinds)}",
    }


def digest_of(texts: Iterable[str]) -> str:
    """A short digest, which is equal if all texts are equal."""
    together = hashlib.blake2b(digest_size=8)
    for text in texts:
        together.update(text.encode() + b"\0")
    return together.hexdigest()


def values_digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """A digest of 63 bits, which is equal if names and tensors are equal, bit for bit.

    The host reads all tensors: a GB takes about a second.
    """
    together = hashlib.blake2b(digest_size=8)
    for name, tensor in named:
        together.update(f"{name} {_checksum(local(tensor))}".encode())
    return int.from_bytes(together.digest(), "little") >> 1


def _checksum(values: Tensor) -> int:
    there = values.cpu().contiguous().flatten().view(torch.uint8)
    if not len(there):
        return 0
    return zlib.crc32((ctypes.c_char * len(there)).from_address(there.data_ptr()))
