"""Which GPUs of a plan copy to each other directly: those whose copies arrive as they were sent."""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda import Gpus

# The copies of one check. A pair that changes bytes changes them in messages of any size.
_NUM_BYTES = 1 << 20


class PeerPairs:
    """Checks a pair of GPUs when a plan first asks for it, in both directions at once.

    The driver says which GPUs reach each other's memory. On some boards, and under some IOMMUs, it
    says so although bytes do not arrive, without any error. Pairs that no plan asks for are not
    enabled.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._checked: set[frozenset[int]] = set()
        # Ordered pairs of lanes whose copies have arrived changed.
        self.wrong: list[tuple[int, int]] = []

    def reaches(self, sender: int, receiver: int) -> bool:
        """Whether one lane copies directly to another."""
        lanes = self._gpus.lanes
        pair = frozenset((lanes.gpu_of(sender), lanes.gpu_of(receiver)))
        if len(pair) == 2 and pair not in self._checked:
            self._check(sender, receiver)
            self._checked.add(pair)
        return lanes.reaches(sender, receiver)

    def _check(self, one: int, other: int) -> None:
        lanes = self._gpus.lanes
        ways = [(a, b) for a, b in ((one, other), (other, one)) if lanes.reaches(a, b)]
        for sender, receiver in ways:
            self._gpus.enable_peer(sender, receiver)
        sent = [self._filled(sender, pattern_of(sender)) for sender, _ in ways]
        landed = [self._filled(receiver, ~pattern_of(sender)) for sender, receiver in ways]
        self._gpus.synchronize()
        lanes.copy_at_once(
            [
                (sender, place.data_ptr(), source.data_ptr(), _NUM_BYTES)
                for (sender, _), place, source in zip(ways, landed, sent, strict=True)
            ]
        )
        for (sender, receiver), place in zip(ways, landed, strict=True):
            if not torch.equal(place.cpu(), pattern_of(sender)):
                lanes.avoid(sender, receiver)
                self.wrong.append((sender, receiver))

    def _filled(self, lane: int, pattern: Tensor) -> Tensor:
        return self._gpus.on_lane(lane, _NUM_BYTES).copy_(pattern)


def pattern_of(sender: int) -> Tensor:
    """Bytes that differ from sender to sender, and do not repeat with a power of two."""
    numbers = torch.arange(_NUM_BYTES, dtype=torch.int32, device="cpu")
    return (numbers * 7 + sender * 31).remainder_(251).to(torch.uint8)
