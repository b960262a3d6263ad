"""Pipelines that recompute, compared with the plain model."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from pykern.plan import Plan
from tests.runtime.models import Case
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step


def check_steps(case: Case, plan: Plan, level: Any, batches: Sequence[int], **options: Any) -> None:
    """Steps of these numbers of rows; each adds to the gradients of those before."""
    plain = copy.deepcopy(case.layers)
    with case.pipeline(plan, recompute=level, **options) as pipe:
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
