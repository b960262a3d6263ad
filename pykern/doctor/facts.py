"""Collects all facts, and tries a step."""

from __future__ import annotations

from ..cgroup import limits
from .cores import cores
from .diagnosis import Diagnosis, Fact
from .gpus import gpus, has_gpus
from .limits import limits_of_process
from .versions import versions


def examine() -> Diagnosis:
    """All facts that decide whether, and how fast, pipelines run here.

    The last fact is a step of a small pipeline on two CPU workers, compared with the plain model.
    """
    facts = [*versions(has_gpus=has_gpus())]
    found = limits()
    if any(fact.stops for fact in facts):
        return Diagnosis([*facts, *gpus(None), *limits_of_process(found)])
    import torch  # noqa: PLC0415 - it may be missing

    facts += [
        *gpus(torch.version.cuda),
        *cores(found, torch.get_num_threads()),
        *limits_of_process(found),
        a_step(),
    ]
    return Diagnosis(facts)


def a_step() -> Fact:
    """A step on two CPU workers, verified."""
    import torch  # noqa: PLC0415 - it may be missing
    from torch import nn  # noqa: PLC0415

    from ..pipeline.pipeline import Pipeline  # noqa: PLC0415

    name, layers = "a step", [nn.Linear(4, 4), nn.Linear(4, 4)]
    try:
        with Pipeline(
            layers, devices="cpu:2", microbatches=2, loss_fn=nn.MSELoss(), verify=True
        ) as pipe:
            pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    # Anything that is raised here would stop a pipeline of the user.
    except Exception as error:
        problem = (
            f"A pipeline of two CPU workers fails with {type(error).__name__}: mend its cause."
        )
        return Fact(name, str(error), problem, stops=True)
    return Fact(name, "two CPU workers give the plain model's bits")
