"""Messages that peers exchange around a step."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .errors import PeerError
from .waiting import Pending

_NUMBERS = struct.Struct("<4qd")
_TEXT_BYTES = 480


@dataclass(frozen=True)
class PeerMessage:
    """A message of a process to all of its peers.

    Attributes:
        rows: number of rows of the sender's batch.
        digest: digest, in 63 bits, of the data that must be equal in all processes.
        is_local: whether the sender's gradients are not summed in this step.
        scale: the factor of the sender's gradients.
        failure: the failure of the sender; empty if it has not failed.
    """

    rows: int = 0
    digest: int = 0
    is_local: bool = False
    scale: float = 1.0
    failure: str = ""

    def to_bytes(self) -> bytes:
        """The message as bytes of a fixed size, so that one collective takes the bytes."""
        counts = self.rows, self.digest, self.is_local, bool(self.failure)
        numbers = _NUMBERS.pack(*counts, self.scale)
        text = self.failure.encode(errors="backslashreplace")[:_TEXT_BYTES]
        return numbers + text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerMessage:
        """The message in the bytes that `to_bytes` made.

        Raises:
            PeerError: the bytes are not those of a message.
        """
        rows, digest, is_local, has_failed, scale = _NUMBERS.unpack_from(data)
        if rows < 0 or digest < 0 or {is_local, has_failed} - {0, 1}:
            raise PeerError(
                "a process of the group sent a message that is not understood here: "
                f"{(rows, digest, is_local, has_failed)}. Use one version of pykern in all of them"
            )
        # The end of a text that was cut may be half a character.
        text = data[_NUMBERS.size :].rstrip(b"\0").decode(errors="ignore")
        return cls(rows, digest, bool(is_local), scale, text if has_failed else "")


def exchange(message: PeerMessage, group: ProcessGroup) -> list[PeerMessage]:
    """The messages of all processes of the group in this exchange, by rank.

    Raises:
        PeerError: a peer sent something else.
        RuntimeError: a peer is gone, or has not come in time.
    """
    mine = torch.frombuffer(bytearray(message.to_bytes()), dtype=torch.uint8)
    everybodys = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(everybodys, mine, group=group, async_op=True)
    Pending(work, on_host=True).wait()
    return [PeerMessage.from_bytes(bytes(one.tolist())) for one in everybodys]
