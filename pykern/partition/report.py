"""Tells where a model can be cut, what would cross there, and what cannot be cut and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..columns import in_columns
from ..modes import as_before
from ..plan.counts import require_counts
from ..tensors.parameters import num_values
from ..tensors.sparse import all_bytes
from ..tensors.trees import all_tensors
from ..trace import CutError, Untouched, why_whole
from .chain import RecordedChain
from .split_points import SplitAt, names_of, whole_names


def explain_cut(
    model: nn.Module,
    sample: Any,
    *,
    num_stages: int = 2,
    split_at: SplitAt | None = None,
    whole: Sequence[str] = (),
) -> str:
    """A table of the places where a model can be cut, in the order of its forward.

    Each line names a module, or a parameter that the forward itself uses, with its number of
    parameters. It has the tensors and bytes that cross if a stage begins there, for a microbatch
    like the sample. Below are places where a cut would be refused, with two stages, and modules
    that cannot be looked into, and why. Where the model cannot be cut at all, the report is the
    reason.

    Args:
        model: with a forward of its own.
        sample: as for `Pipeline`.
        num_stages: what has more than a stage's share of the parameters is looked into.
        split_at: as for `Pipeline`; instead, the modules around these names are looked into.
        whole: as for `Pipeline`: names of modules that are not looked into.
    """
    require_counts(num_stages=num_stages)
    try:
        chain = RecordedChain(model, sample, num_stages, names_of(split_at), whole_names(whole))
    except CutError as error:
        return f"The model cannot be cut: {error}"
    rows = [("a stage can begin with", "parameters", "tensors", "bytes that cross")]
    with Untouched(model, ()).kept(), as_before():
        rows += _places(chain, sample)
    return "\n".join([in_columns(rows, left=0), *_refused(chain), *_wholes(model, chain)])


def _places(chain: RecordedChain, sample: Any) -> Iterator[tuple[str, str, str, str]]:
    value: Any
    (value,) = chain.first_arguments(sample)
    for number, (name, layer) in enumerate(chain.layers.items()):
        tensors = all_tensors(value)
        num_bytes = sum(map(all_bytes, tensors))
        size = sum(map(num_values, layer.parameters()))
        if chain.why_not_at(number) is None:
            yield name, f"{size:,}", f"{len(tensors)}", f"{num_bytes:,}"
        value = layer(value)


def _refused(chain: RecordedChain) -> Iterator[str]:
    """The places where a cut would be refused, such as between a write and a use of a view."""
    for number, name in enumerate(chain.layers):
        reason = chain.why_not_at(number)
        if reason is not None:
            yield f"no stage can begin with {name}: {reason}"


def _wholes(model: nn.Module, chain: RecordedChain) -> Iterator[str]:
    """The modules of the chain that have others within and cannot be looked into."""
    for name, module in model.named_modules():
        reason = why_whole(module)
        if name in chain.layers and reason is not None and next(module.children(), None):
            yield f"{name} ({type(module).__name__}) stays whole: it {reason}"
