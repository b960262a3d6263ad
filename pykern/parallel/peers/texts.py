"""Texts that processes tell each other: JSON of bounded size, which is read as data alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .errors import PeerError
from .waiting import Pending

# A cut of 100,000 layers takes a tenth of it.
MAX_BYTES = 1 << 26


def text_of(text: str, group: ProcessGroup, source: int) -> str:
    """The text of one process; those of the others do not matter.

    Args:
        text: what this process would tell.
        group: of gloo; all of its processes call this.
        source: the rank in it whose text counts.

    Raises:
        PeerError: the text is larger than any that pykern sends, or is not UTF-8.
        RuntimeError: a process is gone, or has not come in time.
    """
    data = text.encode()
    size = torch.tensor([len(data)], device="cpu")
    _wait(dist.broadcast(size, group=group, group_src=source, async_op=True))
    buffer = torch.zeros(_size_from(size, source), dtype=torch.uint8, device="cpu")
    if group.rank() == source:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    _wait(dist.broadcast(buffer, group=group, group_src=source, async_op=True))
    return _text_from(buffer, source)


def texts_of_all(text: str, group: ProcessGroup) -> list[str]:
    """The text of every process, in the order of their ranks.

    Raises:
        PeerError, RuntimeError: as `text_of`.
    """
    data = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size())]
    mine = torch.tensor([len(data)], device="cpu")
    _wait(dist.all_gather(sizes, mine, group=group, async_op=True))
    lengths = [_size_from(size, rank) for rank, size in enumerate(sizes)]
    buffer = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everybodys = [torch.empty_like(buffer) for _ in lengths]
    _wait(dist.all_gather(everybodys, buffer, group=group, async_op=True))
    return [
        _text_from(there[:length], rank)
        for rank, (there, length) in enumerate(zip(everybodys, lengths, strict=True))
    ]


def _wait(work: object) -> None:
    Pending(work, on_host=True).wait()


def _size_from(told: Tensor, rank: int) -> int:
    size = int(told)
    if not 0 < size <= MAX_BYTES:
        raise PeerError(
            f"a text must have 1 to {MAX_BYTES} bytes, got {size} from process {rank} of the group"
        )
    return size


def _text_from(data: Tensor, rank: int) -> str:
    try:
        return data.numpy().tobytes().decode()
    except UnicodeDecodeError as error:
        raise PeerError(f"process {rank} of the group sent bytes that are not UTF-8") from error
