"""Training runs to be saved, and what is compared of them."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

import pykern
from pykern.checkpoint.file import digest

NUM_LAYERS = 8
MICROBATCHES = 4


def layers(dropout: float = 0.0, width: int = 6) -> nn.Sequential:
    """As many as the most devices, with buffers among them."""
    few = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Tanh()]
    return nn.Sequential(*few, *(nn.Linear(width, width) for _ in range(NUM_LAYERS - len(few))))


Step = Callable[[Tensor], Tensor]


@dataclass
class Run:
    """The parts of a loop. `step` adds gradients and returns the loss."""

    model: nn.Module
    step: Step
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler

    def train(self, steps: int) -> list[Tensor]:
        """Steps on data from all three generators; the losses."""
        return [self._train() for _ in range(steps)]

    def _train(self) -> Tensor:
        x = torch.randn(8, 6) * random.uniform(0.5, 1.5) + np.random.uniform()
        self.optimizer.zero_grad()
        loss = self.step(x)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss

    def states(self) -> dict[str, Any]:
        """All that a checkpoint has to bring back."""
        states = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
        }
        return deepcopy(states)

    def parts(self) -> dict[str, Any]:
        """The arguments of `save` and `load`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def close(self) -> None:
        if isinstance(self.model, pykern.Pipeline):
            self.model.close()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def pipelined(devices: str, *, dropout: float = 0.0, **options: Any) -> Run:
    """A run in a pipeline, its loss scaled as with half precision."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    pipe = pykern.Pipeline(
        layers(dropout),
        devices=devices,
        microbatches=MICROBATCHES,
        loss_fn=lambda output, target: scaler.scale(F.mse_loss(output, target)),
        **options,
    )
    optimizer = adam(pipe)
    scheduler = MultiStepLR(optimizer, [2, 5])
    return Run(pipe, lambda x: pipe.step(x, target=x), optimizer, scheduler, scaler)


def plain() -> Run:
    """The same without pykern: microbatch by microbatch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    model = layers()
    optimizer = adam(model)

    def step(x: Tensor) -> Tensor:
        losses = []
        for part in x.chunk(MICROBATCHES):
            losses.append(scaler.scale(F.mse_loss(model(part), part)) * (len(part) / len(x)))
            losses[-1].backward()
        return torch.stack(losses).detach().sum()

    return Run(model, step, optimizer, MultiStepLR(optimizer, [2, 5]), scaler)


def same(ours: Any, theirs: Any) -> bool:
    """Equal to the bit and of equal types, tensors among them."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        both = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return both and digest(ours.detach()) == digest(theirs.detach())
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    # The repr tells zeros apart, and NaN is equal to itself.
    return repr(ours) == repr(theirs) if isinstance(ours, float) else bool(np.all(ours == theirs))
