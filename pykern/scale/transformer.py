"""A GPT by its sizes: parameters, operations and activations of each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from pykern.plan import require_counts

Recomputed = Literal["none", "scores", "layer"]
_T = TypeVar("_T")

BFLOAT16_BYTES = 2
FLOAT32_BYTES = 4


class Traffic(NamedTuple):
    """Bytes that kernels other than products read and write for a token, on one shard.

    Attributes:
        forward: In a forward.
        backward: In a backward.
        scores: In a forward, for attention scores; `forward` has these as well.
    """

    forward: float
    backward: float
    scores: float


# Bytes of each feature of a layer's activations, and of each score, in bfloat16. Kernels are fused
# as by Narayanan et al., 2021, arXiv 2104.04473, section 4.2. A norm reads and writes its
# activations, and reads two and writes one in backward. Dropout with the residual's addition reads
# two, writes one and a mask of a byte; backward reads one and the mask, writes one, and adds two
# gradients. There are two of both. GELU is four times as wide. Scores have a softmax and dropout.
WHOLE = Traffic(2 * (4 + 7), 2 * (6 + 5 + 6), 0)
SLICED = Traffic(4 * 4, 4 * 6, 0)
SCORES = Traffic(4 + 5, 5 + 6, 4 + 5)


@dataclass(frozen=True)
class Transformer:
    """Layers of attention and a feed-forward part of four times the width, embedding and head.

    Attributes:
        num_layers: Blocks.
        width: Features of the activations between them.
        sequence: Tokens of a row of the batch.
        vocabulary: Rows of the embedding, and of the head, which is not tied to it.
        heads: Attention heads, if their scores are written to memory; None for fused attention.
    """

    num_layers: int
    width: int
    sequence: int
    vocabulary: int
    heads: int | None = None

    def __post_init__(self) -> None:
        require_counts(
            num_layers=self.num_layers,
            width=self.width,
            sequence=self.sequence,
            vocabulary=self.vocabulary,
            heads=1 if self.heads is None else self.heads,
        )

    def parts(self, num_stages: int) -> list["Part"]:
        """The stages. Blocks left over by an even share go to the first ones; the last has a head.

        Raises:
            ValueError: There are more stages than layers.
        """
        if num_stages > self.num_layers:
            raise ValueError(
                f"num_layers must be at least {num_stages}, one for each stage, got "
                f"{self.num_layers}"
            )
        least, more = divmod(self.num_layers, num_stages)
        if num_stages == 1:
            return [Part(self, least, embeds=True, has_head=True)]
        # Equal stages are one object: there may be as many as GPUs.
        longer, shorter = (Part(self, least + one, False, False) for one in (1, 0))
        inside = [longer if stage < more else shorter for stage in range(1, num_stages - 1)]
        first = replace(longer if more else shorter, embeds=True)
        return [first, *inside, replace(shorter, has_head=True)]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.parts(1)[0].num_parameters


def of_each(parts: Sequence["Part"], value: Callable[["Part"], _T]) -> list[_T]:
    """A value of each stage, which is made once for all that are the same object."""
    values = {key: value(part) for key, part in {id(part): part for part in parts}.items()}
    return [values[id(part)] for part in parts]


@dataclass(frozen=True)
class Part:
    """Layers that follow each other, as they are on all GPUs of a stage together.

    Norms and biases are left out: less than one in a thousand at usual widths.
    """

    model: Transformer
    num_layers: int
    embeds: bool
    has_head: bool

    @property
    def num_parameters(self) -> int:
        """Four squares of the width in attention, eight in the feed-forward part."""
        tables = self.embeds + self.has_head
        return self._layer_parameters + tables * self.model.vocabulary * self.model.width

    @property
    def weight_flops(self) -> float:
        """Operations of a token's products with weights, forward and in each half of backward."""
        head = self.has_head * self.model.vocabulary * self.model.width
        return 2.0 * (self._layer_parameters + head)

    @property
    def score_flops(self) -> float:
        """Operations of a token's products of activations, forward; twice as many in backward.

        Over the whole square, though a causal mask needs half: so Narayanan et al. count, Efficient
        Large-Scale Language Model Training on GPU Clusters, 2021, arXiv 2104.04473.
        """
        return 4.0 * self.num_layers * self.model.sequence * self.model.width

    def traffic_bytes(self, num_slices: int, sequence_parallel: bool) -> Traffic:
        """Bytes that one of so many shards reads and writes for a token beside products.

        The head is left out: less than one in a hundred at usual sizes.
        """
        width, scores = self.model.width, self._num_scores / num_slices
        whole = 1 / num_slices if sequence_parallel else 1.0
        forward, backward, of_scores = (
            self.num_layers * (width * (w * whole + s / num_slices) + of * scores)
            for w, s, of in zip(WHOLE, SLICED, SCORES, strict=True)
        )
        return Traffic(forward, backward, of_scores)

    def activation_bytes(
        self,
        num_tokens: int,
        num_slices: int,
        recompute: Recomputed = "none",
        sequence_parallel: bool = False,
    ) -> float:
        """Bytes that one of so many shards keeps of so many tokens until their backward.

        In bfloat16, with dropout: Korthikanti et al., Reducing Activation Recomputation in Large
        Transformer Models, 2022, arXiv 2205.05198. Without sequence parallelism every shard has 10
        of a feature's 34 bytes whole. Scores have 5 bytes each, unless attention is fused.
        """
        whole = 1 / num_slices if sequence_parallel else 1.0
        layer = self.model.width * (10 * whole + 24 / num_slices)
        if recompute == "none":
            layer += 5 * self._num_scores / num_slices
        if recompute == "layer":
            layer = BFLOAT16_BYTES * self.model.width * whole
        logits = self.has_head * FLOAT32_BYTES * self.model.vocabulary / num_slices
        return num_tokens * (self.num_layers * layer + logits)

    @property
    def _num_scores(self) -> int:
        """Scores of a token in a layer that are written to memory."""
        return (self.model.heads or 0) * self.model.sequence

    @property
    def _layer_parameters(self) -> int:
        return 12 * self.num_layers * self.model.width**2
