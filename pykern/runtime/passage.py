"""How tensors get from a stage to its neighbours, and out of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Passage:
    """The way out of a stage where all stages share one memory: there is nothing to do.

    Others move what passes, into memory that is used again and again.
    """

    def there(self, microbatch: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the next stage gets for these outputs, which are detached."""
        del microbatch
        return outputs

    def back(self, microbatch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What the previous stage gets for these gradients of its outputs."""
        del microbatch
        return gradients

    def take_in(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients that have come for the stage, as its backward may keep them."""
        return gradients

    def keep(self, output: Any) -> Any:
        """An output that leaves the pipeline, as its caller may keep it."""
        return output
