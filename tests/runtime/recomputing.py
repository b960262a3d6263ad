"""Pipelines that recompute, compared with the plain model."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

import pykern
from pykern.plan import Plan
from tests.runtime.models import Case
from tests.runtime.reference import assert_same_state, plain_step


def check_steps(case: Case, plan: Plan, level: Any, batches: Sequence[int], **options: Any) -> None:
    """Steps of these numbers of rows; each adds to the gradients of those before."""
    plain = copy.deepcopy(case.layers)
    with pipeline(case, plan, recompute=level, **options) as pipe:
        for rows in batches:
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(
                plain,
                x.clone(),
                y,
                case.loss_fn,
                plan.num_microbatches,
                pipe.partition.stages,
                num_replicas=plan.placement.num_replicas,
            )
            assert torch.equal(pipe.step(x.clone(), target=y), expected)
            assert_same_state(pipe, plain)


def pipeline(case: Case, plan: Plan, **options: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        case.layers,
        devices=f"cpu:{plan.num_devices}",
        schedule=plan,
        loss_fn=case.loss_fn,
        **{"balance": "layers", **options},
    )
