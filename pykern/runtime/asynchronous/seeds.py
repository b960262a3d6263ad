"""Random numbers of batches that are in flight together."""

from __future__ import annotations

import torch

from ..random.seed import StepSeed


class BatchSeed(StepSeed):
    """The seed of a batch whose random numbers may be drawn in later steps too.

    By then the caller may have drawn other numbers, so the seed is taken when the batch enters. If
    it turns out that no stage draws, the seed is given back.
    """

    def take(self) -> None:
        """Draws the seed from the caller's generator."""
        self._before = torch.default_generator.get_state()
        self.value()
        self.use()
        self._after = torch.default_generator.get_state()

    def give_back(self) -> None:
        """Undoes `take`, unless the generator has been used since."""
        if torch.equal(torch.default_generator.get_state(), self._after):
            torch.default_generator.set_state(self._before)


class SlotSeeds(StepSeed):
    """The seeds of all batches in flight, by slot.

    Args:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._of: list[tuple[StepSeed, int]] = [(StepSeed(), 0)] * num_slots

    def put(self, slot: int, seed: StepSeed, index: int) -> None:
        """Assigns a slot to microbatch `index` of the batch that has this seed."""
        self._of[slot] = seed, index

    def of(self, microbatch: int) -> tuple[StepSeed, int]:
        """The seed of the batch, and the index of the microbatch within the batch."""
        return self._of[microbatch]
