"""The outcome of a model on a pipeline: equal to the plain model, or refused."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import pykern
from tests.zoo.case import Case
from tests.zoo.oracle import Plain, equal

Kind = Literal["bit-equal", "equal but for ties", "refused", "wrong"]

MICROBATCHES = 2


@dataclass(frozen=True)
class Outcome:
    """The outcome of a model.

    Attributes:
        kind: "equal but for ties" if stages share parameters and the sums of the stages are added
            at the end; "wrong" if any bit differs from the documented result.
        detail: the message of the refusal, or the first value that differs and by how much.
    """

    kind: Kind
    detail: str = ""


def outcome(make: Callable[[], Case], num_stages: int) -> Outcome:
    """Runs a step of the model on so many stages, and of the plain model microbatch by microbatch.

    Args:
        make: gives the model with its data, the same for the same random numbers.
        num_stages: on as many devices.

    Raises:
        Exception: whatever else than a refusal the pipeline ends with.
    """
    torch.manual_seed(1)
    case = make()
    plain = copy.deepcopy(case)
    try:
        pipe = _pipeline(case, num_stages)
    except (pykern.CutError, ValueError) as refusal:
        return Outcome("refused", _first_line(refusal))
    with pipe:
        names = pipe.partition.layer_names
        if isinstance(case.model, nn.Sequential):
            names = tuple(case.model._modules)
        starts = [names[span.start] for span in pipe.partition.stages]
        torch.manual_seed(7)
        loss = pipe.step(*case.args, **case.kwargs)
        found = _state(pipe, loss)
    plain.draws = _draws(plain)
    shared = copy.deepcopy(plain) if not plain.draws else None
    if shared is not None and not _difference(found, _plain(shared, ())):
        return Outcome("bit-equal")
    difference = _difference(found, _plain(plain, starts))
    if difference:
        return Outcome("wrong", difference)
    return Outcome("bit-equal" if plain.draws else "equal but for ties")


def _pipeline(case: Case, num_stages: int) -> pykern.Pipeline:
    return pykern.Pipeline(
        case.model,
        devices=f"cpu:{num_stages}",
        schedule="one_f_one_b",
        microbatches=MICROBATCHES,
        loss_fn=case.loss_fn,
        sample=case.sample(case.rows // MICROBATCHES),
    )


def _draws(case: Case) -> bool:
    """Whether the plain model draws random numbers. It is changed by no more than that."""
    model = copy.deepcopy(case.model)
    before = torch.get_rng_state()
    model(*copy.deepcopy(case.args), **copy.deepcopy(case.kwargs))
    drew = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    return drew


def _plain(case: Case, starts: Sequence[str]) -> dict[str, Tensor | None]:
    plain = Plain(case, MICROBATCHES, starts, 1)
    torch.manual_seed(7)
    return _state(case.model, plain.step())


def _state(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Loss, gradients and buffers, by name."""
    return {
        "the loss": loss,
        **{f"gradient of {name}": p.grad for name, p in model.named_parameters()},
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def _difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> str:
    """Says which value differs first, and how many do; empty where none does."""
    if found.keys() != expected.keys():
        return f"names differ: {sorted(found.keys() ^ expected.keys())[:3]}"
    wrong = [name for name, value in expected.items() if not equal(found[name], value)]
    if not wrong:
        return ""
    one, other = found[wrong[0]], expected[wrong[0]]
    if one is None or other is None:
        return f"{wrong[0]} and {len(wrong) - 1} more: {one is None}, {other is None}"
    error = (one.double() - other.double()).norm() / other.double().norm()
    return f"{wrong[0]} and {len(wrong) - 1} more: relative error {error:.1e}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
