"""How tensors get from a stage to others, and out of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Transport:
    """The way out of a stage where all stages share one memory: there is nothing to do.

    Others move what passes, into memory that is used again and again.
    """

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What that later stage gets for these outputs, which are detached."""
        del microbatch, reader
        return outputs

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """What that earlier stage gets for these gradients of its outputs."""
        del microbatch, maker
        return gradients

    def arrive(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """What has come from a stage that is not the previous one, as the stage may keep it."""
        return values

    def take_in(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients that have come for the stage, as its backward may keep them."""
        return gradients

    def keep(self, output: Any) -> Any:
        """An output that leaves the pipeline, as its caller may keep it."""
        return output
