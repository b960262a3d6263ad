"""A model and a batch to train, and the ways of doing it."""

from dataclasses import dataclass
from typing import get_args

from pykern.one_of import require_one_of
from pykern.plan import require_counts, require_flags
from pykern.scale.transformer import Recomputed, Transformer


@dataclass(frozen=True)
class Job:
    """Model and batch to train, however they are laid out.

    Attributes:
        model: Its sizes.
        batch: Rows of a step, over all processes.
        microbatch: Rows of a microbatch.
        zero: 1 shares the optimizer's state out over the data-parallel processes, 0 does not.
        recompute: Backward computes again "none", the attention "scores", or every "layer".
        sequence_parallel: Shards divide rows where they do not divide features, and send parts.
        overlap_sums: Sums of a backward within a stage run beside products for weight gradients.

    Raises:
        TypeError: A count is not an int, the model not a `Transformer`, or a flag not a bool.
        ValueError: A count is below 1, or zero or recompute is something else.
    """

    model: Transformer
    batch: int
    microbatch: int = 1
    zero: int = 0
    recompute: Recomputed = "none"
    sequence_parallel: bool = False
    overlap_sums: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise TypeError(
                f"model must be a Transformer, got {self.model!r}. Give "
                "pykern.scale.Transformer(num_layers, width, sequence, vocabulary)"
            )
        require_counts(batch=self.batch, microbatch=self.microbatch)
        require_flags(sequence_parallel=self.sequence_parallel, overlap_sums=self.overlap_sums)
        if self.zero not in (0, 1):
            raise ValueError(
                f"zero must be 0 or 1, got {self.zero}. Stages 2 and 3 would send gradients or "
                "parameters for every microbatch"
            )
        require_one_of("recompute", self.recompute, get_args(Recomputed))

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch * self.model.sequence

    def num_microbatches(self, data: int) -> int:
        """Microbatches of one of so many pipelines.

        Raises:
            ValueError: The batch cannot be shared out in whole microbatches.
        """
        num_microbatches, rest = divmod(self.batch, data * self.microbatch)
        if rest or not num_microbatches:
            raise ValueError(
                f"batch must be a multiple of {data} pipelines with microbatches of "
                f"{self.microbatch}, got {self.batch}"
            )
        return num_microbatches
