"""A GPT by its sizes: parameters, operations and activations of each stage."""

from dataclasses import dataclass

from pykern.plan import require_counts

BFLOAT16_BYTES = 2
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Transformer:
    """Layers of attention and a feed-forward part of four times the width, embedding and head.

    Attributes:
        num_layers: Blocks.
        width: Features of the activations between them.
        sequence: Tokens of a row of the batch.
        vocabulary: Rows of the embedding, and of the head, which is not tied to it.
    """

    num_layers: int
    width: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        require_counts(
            num_layers=self.num_layers,
            width=self.width,
            sequence=self.sequence,
            vocabulary=self.vocabulary,
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
        return [
            Part(self, least + (stage < more), stage == 0, stage == num_stages - 1)
            for stage in range(num_stages)
        ]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.parts(1)[0].num_parameters


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

    def activation_bytes(self, num_tokens: int, num_slices: int) -> float:
        """Bytes that one of so many shards keeps of so many tokens until their backward.

        In bfloat16, with dropout and without the scores, which fused attention does not keep:
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
        arXiv 2205.05198. Every shard has 10 of the 34 bytes whole.
        """
        layer = self.model.width * (10 + 24 / num_slices)
        logits = self.has_head * FLOAT32_BYTES * self.model.vocabulary / num_slices
        return num_tokens * (self.num_layers * layer + logits)

    @property
    def _layer_parameters(self) -> int:
        return 12 * self.num_layers * self.model.width**2
