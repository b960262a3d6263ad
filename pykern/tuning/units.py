"""The places where stages of a model can begin, in a form that holds for any number of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..partition.balance import require_num_stages
from ..partition.bottleneck import spans_of
from ..partition.chain import Chain, RecordedChain, max_stages, open_model

# The most units for each device: more units make the search longer, and cuts little better.
MOST_OF_A_DEVICE = 16


@dataclass(frozen=True)
class Units:
    """A model as a row of units, of which stages are made.

    The segments of a recorded model depend on the number of its stages. So a unit is named by the
    module that it begins with, a name that `split_at=` takes for any number of stages.

    Attributes:
        names: the names of the units, in order.
        layers: by unit, its layers in the chain.
        chain: the model.
    """

    names: tuple[str, ...]
    layers: tuple[range, ...]
    chain: Chain | RecordedChain

    def modules(self) -> list[list[nn.Module]]:
        """By unit, its layers."""
        layers = list(self.chain.layers.values())
        return [layers[span.start : span.stop] for span in self.layers]

    def split_at(self, spans: Sequence[range]) -> list[str]:
        """The names that stages of these units begin with, all but the first."""
        return [self.names[span.start] for span in spans[1:]]


def units_of(
    model: nn.Module | Sequence[nn.Module], sample: Any, num_devices: int, whole: Sequence[str]
) -> Units:
    """The units of a model.

    Args:
        model: as for `Pipeline`.
        sample: as for `Pipeline`.
        num_devices: the number of devices of a pipeline.
        whole: as for `Pipeline`.

    Raises:
        TypeError, ValueError, CutError: as `Pipeline`.
    """
    most = num_devices * MOST_OF_A_DEVICE
    chain = open_model(model, sample, min(max_stages(model), most), None, whole)
    names = list(chain.layers)
    require_num_stages(1, len(names))
    starts = [0, *(i for i in range(1, len(names)) if _can_begin(chain, names, i))]
    if len(starts) > most:
        starts = [starts[len(starts) * i // most] for i in range(most)]
    spans = spans_of([*starts[1:], len(names)])
    return Units(tuple(names[start] for start in starts), spans, chain)


def _can_begin(chain: Chain | RecordedChain, names: Sequence[str], index: int) -> bool:
    """Whether `split_at` finds the layer by its name."""
    if isinstance(chain, Chain):
        return True
    # Operations outside of modules, and further calls of a module, do not have a module's name.
    modules = dict(chain.root.named_modules()) if chain.root is not None else {}
    name = names[index]
    return name in modules and not any(name.startswith(f"{other}.") for other in names[:index])
