"""Torch's own runtime runs our plans, with a process for each device: same gradients."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pykern.plan import Plan, save_plan
from pykern.schedules import by_name
from tests.plan import torch_rank

Gradients = dict[str, Any]

NUM_DEVICES, NUM_MICROBATCHES = 4, 8


def run_by_torch(folder: Path, plans: dict[str, Plan]) -> list[tuple[str, Gradients]]:
    """All gradients after one step of each plan in each of torch's two forms, by what was run."""
    jobs: list[dict[str, Any]] = []
    for name, plan in plans.items():
        for form in ("compute_only", "compute_comms"):
            file = f"{name}-{form}.csv"
            save_plan(plan, folder / file, transfers=form == "compute_comms")
            jobs.append(
                {
                    "file": file,
                    "format": form,
                    "device_of": plan.placement.replicas[0],
                    "num_microbatches": plan.num_microbatches,
                }
            )
    (folder / "job.json").write_text(json.dumps({"num_ranks": NUM_DEVICES, "plans": jobs}))
    ranks = subprocess.Popen(
        [sys.executable, torch_rank.__file__, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = ranks.communicate(timeout=50)
        assert ranks.returncode == 0, said
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    parts = [torch.load(folder / f"{rank}.pt") for rank in range(NUM_DEVICES)]
    return [
        (job["file"], {key: value for part in parts for key, value in part[number].items()})
        for number, job in enumerate(jobs)
    ]


def plain_gradients(plan: Plan) -> Gradients:
    model = torch.nn.Sequential(*torch_rank.make_model(plan.num_stages))
    batch, target = torch_rank.make_batch(plan.num_microbatches)
    torch_rank.loss_of(model(batch), target).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trainable() -> dict[str, Plan]:
    """Every schedule of the catalogue that torch's file can say and that has a backward."""
    plans = {}
    for name, schedule in by_name.items():
        plan = schedule(NUM_DEVICES, NUM_MICROBATCHES)
        kinds = {action.kind.name for row in plan.rows for action in row}
        simple = plan.placement.num_replicas == plan.num_slices == 1
        if simple and kinds <= set("FBIW") and kinds != {"F"}:
            plans[name] = plan
    return plans


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the runtime of an older torch is another")
def test_every_plan_runs_and_gives_the_plain_gradients(tmp_path: Path) -> None:
    plans = trainable()
    assert {"gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"} <= plans.keys()
    results = run_by_torch(tmp_path, plans)
    assert len(results) == 2 * len(plans)
    for file, gradients in results:
        expected = plain_gradients(plans[file.rsplit("-", 1)[0]])
        assert gradients.keys() == expected.keys(), file
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-12), (file, name)
