"""Runs a user's training script on a box that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from ..boxes import Box
from ..pipeline.build import Design, design
from ..pipeline.combinations import refuse_combinations
from ..pipeline.designer import designing
from ..pipeline.request import Request
from ..runtime.features.feature import Feature
from ..script import run_script
from .host_waits import HostWaits
from .names import gpus_of
from .on_cpu import OnCpu
from .optimizers import MadeOptimizers
from .order import orders_of
from .prediction import predicted
from .report import Rehearsal, RehearsedPipeline
from .setting import Setting
from .watched import Watched, on_workers


def rehearse(script: str, arguments: Sequence[str], box: Box, steps: int = 3) -> Rehearsal:
    """Runs a script, unchanged, as if this machine were the box.

    Pipelines for GPUs run on as many CPU workers. All else that the script does on GPUs is done on
    the CPU. Memory and times are predicted, and the orders that GPUs would get are checked by the
    model of a driver.

    Args:
        script: its file.
        arguments: its arguments.
        box: the box.
        steps: the number of steps of a pipeline, after which the script is ended.

    Returns:
        The findings.

    Raises:
        ValueError: there is no such file, or the script makes no pipeline for GPUs that takes a
            step.
        ScriptFailed: the script raises an exception.
    """
    waits = HostWaits()
    at = Setting(box, steps, waits, OnCpu(waits, len(box.devices)), MadeOptimizers())
    found = _Pipelines(at)
    with ExitStack() as undo:
        undo.enter_context(gpus_of(box, waits))
        undo.enter_context(at.optimizers.watched())
        undo.enter_context(designing(found.design))
        undo.callback(found.close)
        undo.enter_context(at.mode.in_force())
        run_script(script, arguments)
    looked_at = [one for one in found.made if one.fit is not None]
    if not looked_at:
        raise ValueError(
            f"{Path(script).name} must take a step of a pykern.Pipeline for GPUs, got "
            f"{_instead(found)}"
        )
    parameters = [id(each) for one in looked_at for each in one.model.parameters()]
    shared = len(set(parameters)) < len(parameters)
    return Rehearsal(box, [_seen(one, box) for one in looked_at], dict(waits.found), shared)


def _instead(found: _Pipelines) -> str:
    if found.made:
        return "calls alone. Rehearsals look at pipe.step and pipe.map, not at losses outside"
    pipelines = "pipelines of CPU workers" if found.on_workers else "no pipeline"
    return f'{pipelines}. Give the script its arguments for GPUs, such as devices="cuda"'


def _seen(one: Watched, box: Box) -> RehearsedPipeline:
    assert one.fit is not None
    orders = {
        way: orders_of(one.plan, one.asked.lanes, peers=peers)
        for way, peers in (("from GPU to GPU", True), ("by way of the host", False))
    }
    return RehearsedPipeline(
        one.plan,
        [lane.device.index for lane in one.asked.lanes],
        one.losses,
        one.fit,
        orders,
        [*one.obstacles, *one.waits],
        predicted(one, box),
    )


class _Pipelines:
    """The pipelines that the script makes."""

    def __init__(self, at: Setting) -> None:
        self._at = at
        self.made: list[Watched] = []
        self.on_workers = False

    def design(self, asked: Request) -> Design:
        """Chooses for workers where GPUs are asked for, with a feature that looks at the steps."""
        if not asked.on_gpus:
            self.on_workers = True
            return design(asked)
        refuse_combinations(asked)
        return replace(design(on_workers(asked)), more=(partial(self._watch, asked),))

    def _watch(self, asked: Request, of: Design, model: nn.Module) -> Feature:
        self.made.append(Watched(asked, of, model, self._at))
        return self.made[-1]

    def close(self) -> None:
        """Ends the workers of pipelines that the script has left open."""
        for one in self.made:
            one.model.close()
