"""Random numbers of batches that are in flight together."""

from __future__ import annotations

import torch

from ..random.seed import StepSeed


class BatchSeed(StepSeed):
    """The seed of a batch that may be drawn from in later steps too.

    By then the caller may have drawn other numbers, so this one is taken when the batch comes. That
    is undone where it turns out that no stage draws.
    """

    def take(self) -> None:
        """Takes the number from the caller's generator."""
        self._before = torch.default_generator.get_state()
        self.value()
        self.use()
        self._after = torch.default_generator.get_state()

    def give_back(self) -> None:
        """Undoes `take`, unless others have drawn since."""
        if torch.equal(torch.default_generator.get_state(), self._after):
            torch.default_generator.set_state(self._before)


class SlotSeeds(StepSeed):
    """The seeds of all batches in flight, by slot.

    Args:
        num_slots: how many microbatches have one.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._of: list[tuple[StepSeed, int]] = [(StepSeed(), 0)] * num_slots

    def put(self, slot: int, seed: StepSeed, index: int) -> None:
        """A slot has a microbatch of a batch from now on."""
        self._of[slot] = seed, index

    def of(self, microbatch: int) -> tuple[StepSeed, int]:
        """The seed of the batch, and which of its microbatches this is."""
        return self._of[microbatch]
