"""Every two options of a pipeline: a step runs with both, or the table's message is raised."""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

import pykern
from pykern.pipeline.combinations import OPTIONS, OUTSIDE, REFUSED, refuse_combinations
from pykern.pipeline.request import Request
from pykern.runtime.features import compiled
from tests.fake_cuda.fake import FakeCuda


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _loss(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.square().mean() if target is None else (output - target).square().mean()


# Arguments of a pipeline, or a step, for each option of the table; those of two groups are filled
# in when there are any.
GIVEN: dict[str, dict[str, Any]] = {
    "CPU workers": {},
    "replicas": {"replicas": 2},
    "a plan of replicas": {"schedule": "chimera"},
    "capture": {"capture": "auto"},
    "capture that has to be": {"capture": True},
    "recompute": {"recompute": "stage"},
    "recompute of parts of a stage": {"recompute": "layer"},
    "a budget": {"recompute": pykern.Budget(10**9, sample=torch.ones(2, 4))},
    "check_finite": {"check_finite": "activations"},
    "deferred_batch_norm": {"deferred_batch_norm": True},
    "process_group": {"process_group": None},
    "optimizer": {"optimizer": _sgd, "schedule": "pipedream"},
    "tensor_parallel": {"tensor_parallel": None},
    "verify": {"verify": True},
    "timeout": {"timeout": 60.0},
    "threads that issue": {"issue": "threads"},
    "compile": {"compile": "stages"},
    "scaler": {},
}
# Two ways to give one argument; two devices are too few for both kinds of replicas.
ONE_ARGUMENT = [
    {"recompute", "a budget"},
    {"recompute", "recompute of parts of a stage"},
    {"a budget", "recompute of parts of a stage"},
    {"a plan of replicas", "optimizer"},
    {"replicas", "a plan of replicas"},
]
IMPLIED = {
    "replicas": ["a plan of replicas"],
    "capture that has to be": ["capture"],
    "recompute of parts of a stage": ["recompute"],
    "a budget": ["recompute", "recompute of parts of a stage"],
}


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, dict[str, Any]]]:
    """Groups of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    yield {
        "process_group": {"process_group": dist.group.WORLD},
        "tensor_parallel": {
            "tensor_parallel": (mesh, {"0": ColwiseParallel(use_local_output=True)})
        },
    }
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _compiled_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def step(options: dict[str, Any], scaler: Any = None) -> None:
    """Makes a pipeline of these options, and a step of it."""
    # Replicas have no running statistics, whose updates would have no order.
    norm = nn.BatchNorm1d(4) if options.keys() == {"deferred_batch_norm"} else nn.LayerNorm(4)
    layers = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.Tanh())
    arguments: dict[str, Any] = {"devices": "cpu:2", "microbatches": 4, "loss_fn": _loss}
    arguments |= options
    kind = pykern.AsyncPipeline if "optimizer" in options else pykern.Pipeline
    with kind(layers, **arguments) as pipe:
        loss = pipe.step(torch.randn(8, 4), target=torch.randn(8, 4), scaler=scaler)
        assert loss.isfinite()


def message(pair: tuple[str, str], options: dict[str, Any]) -> str | None:
    """The table's entry for two options on CPU workers; None for nothing."""
    implied = [other for name in pair for other in IMPLIED.get(name, [])]
    there = {*pair, *implied, "CPU workers"}
    found = next((text for names, text in REFUSED.items() if there >= set(names)), None)
    if found is None:
        return None
    given: dict[str, Any] = {"devices": "cpu:2", "schedule": "gpipe"} | options
    asked = Request(model=nn.Identity(), **given)
    # Up to what a plan, which is not chosen here, would fill in.
    return found.partition("{plan")[0].format(asked=asked)


@pytest.mark.parametrize(
    "pair",
    [pair for pair in combinations(GIVEN, 2) if set(pair) not in ONE_ARGUMENT],
    ids=" and ".join,
)
def test_two_options_work_or_are_refused(
    pair: tuple[str, str], groups: dict[str, dict[str, Any]]
) -> None:
    given = GIVEN | groups
    options = given[pair[0]] | given[pair[1]]
    scaler = torch.amp.GradScaler("cpu") if "scaler" in pair else None
    why = message(pair, options)
    if why is None:
        step(options, scaler)
        return
    with pytest.raises(ValueError, match=re.escape(why)):
        step(options, scaler)


def test_what_gpus_cannot_have(gpus: FakeCuda) -> None:
    given: dict[str, Any] = {"model": nn.Identity(), "devices": ["cuda:0"]}
    asked = Request(**given, **GIVEN["optimizer"])
    with pytest.raises(ValueError, match=re.escape(REFUSED["optimizer", "GPUs"])):
        refuse_combinations(asked)
    for capture in (True, "step"):
        refuse_combinations(Request(**given, schedule="gpipe", capture=capture, timeout=60.0))
        asked = Request(**given, schedule="gpipe", capture=capture, issue="threads")
        with pytest.raises(ValueError, match=re.escape(REFUSED["threads that issue", "capture"])):
            refuse_combinations(asked)
    refuse_combinations(Request(**given, schedule="gpipe", issue="threads", timeout=60.0))


def test_the_table_is_of_options() -> None:
    assert {option for pair in REFUSED for option in pair} <= OPTIONS.keys()
    of_calls = {OUTSIDE, "a loss of a call", "a profile"}
    assert OPTIONS.keys() - GIVEN.keys() == {"GPUs", *of_calls}
    assert not any(pair[::-1] in REFUSED for pair in REFUSED)
