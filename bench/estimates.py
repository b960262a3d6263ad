"""Compares `pykern.estimate` with the bytes that steps hold, on models of other projects.

    python -m bench.estimates --out estimates.jsonl               # all that are installed
    python -m bench.estimates --only transformers --every 10      # some of them

Each model is estimated without its weights, and runs two steps of 1F1B on two CPU workers. The
tensors of the second step are counted on each device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pykern
from pykern.tensors.trees import map_tensors
from tests.torture.models import all_models
from tests.zoo.case import Case

from .live import counted_bytes

_NUM_DEVICES = 2
_NUM_MICROBATCHES = 4


def compared(make: Callable[[], Case]) -> dict[str, Any]:
    """Activations that each device holds at most, estimated and measured, in bytes."""
    torch.manual_seed(1)
    case = _doubled(make())
    sample = case.sample(case.rows // _NUM_MICROBATCHES)
    common: dict[str, Any] = {
        "schedule": "one_f_one_b",
        "microbatches": _NUM_MICROBATCHES,
        "loss_fn": case.loss_fn,
    }
    found = pykern.estimate(
        case.model,
        devices=_NUM_DEVICES,
        sample=case.args[0] if sample is None else sample,
        **common,
    )
    with pykern.Pipeline(
        case.model, devices=f"cpu:{_NUM_DEVICES}", sample=sample, **common
    ) as pipe:
        # Gradients are there from now on.
        pipe.step(*case.args, **case.kwargs)
        with counted_bytes(pipe) as live:
            pipe.step(*case.args, **case.kwargs)
    return {
        "estimated": [device.activations for device in found.devices],
        "measured": [device.peak for device in live],
    }


def _doubled(case: Case) -> Case:
    """With each row twice, so that a microbatch has the two rows that a batch norm needs."""

    def twice(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor])

    args, kwargs = map_tensors(twice, (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs, rows=2 * case.rows)


def results(only: str, every: int) -> Iterator[dict[str, Any]]:
    """One for each model."""
    names = [name for name in all_models() if name.startswith(only)]
    for name in names[::every]:
        try:
            yield {"model": name} | compared(all_models()[name])
        except Exception as error:
            yield {"model": name, "refused": f"{type(error).__name__}: {error}".split("\n")[0]}


def summary(found: list[dict[str, Any]]) -> str:
    """Errors of the devices of all models."""
    errors = [
        (estimated - measured) / measured
        for one in found
        if "measured" in one
        for estimated, measured in zip(one["estimated"], one["measured"], strict=True)
    ]
    sizes = sorted(map(abs, errors))
    return (
        f"{len(errors)} devices of {len(errors) // _NUM_DEVICES} models, "
        f"{sum('refused' in one for one in found)} refused: error {statistics.median(sizes):.1%} "
        f"in the median, {sizes[int(0.9 * len(sizes))]:.1%} at the 90th percentile; "
        f"{sum(error < -0.02 for error in errors)} devices under by more than 2 %, "
        f"at most {-min(errors):.1%}"
    )


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="results are written to this file")
    parser.add_argument("--only", default="", help="models whose names begin like this")
    parser.add_argument("--every", type=int, default=1, help="every so many models")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for one in results(arguments.only, arguments.every):
        found.append(one)
        print(json.dumps(one), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(f"{json.dumps(one)}\n" for one in found), encoding="utf-8")
    print(summary(found))


if __name__ == "__main__":
    main()
