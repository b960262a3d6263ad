"""How tensors get from a stage to its neighbours, and what a stage keeps until they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Passage:
    """The way out of a stage whose neighbours are on the same device: there is nothing to do.

    Others may move what passes, into memory that is used again and again.
    """

    def there(self, microbatch: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the next stage gets for these outputs, which are detached."""
        del microbatch
        return tensors

    def back(self, microbatch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What the previous stage gets for these gradients of its outputs."""
        del microbatch
        return gradients

    def keep(self, results: Any) -> Any:
        """What leaves the pipeline, in memory of its own."""
        return results

    def take_in(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients that came for a stage, before a backward may make them its own."""
        return gradients
