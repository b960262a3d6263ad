"""The update rules of PipeDream and PipeDream-2BW in plain Python, without any of pykern's runtime.

Microbatches are taken one after another. Every version of every stage is a module of its own, kept
for ever; who reads which one is a formula.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pykern.runtime.random.seed import action_seed

LossFn = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
# Gets (group, stage, number of stages); returns how many updates come before its forwards.
Reads = Callable[[int, int, int], int]


def pipedream(group: int, stage: int, num_stages: int) -> int:
    """Stage s reads for microbatch m the weights written after m - (S - 1 - s) microbatches."""
    return max(group - (num_stages - 1 - stage), 0)


def two_buffered(group: int, stage: int, num_stages: int) -> int:
    """Every stage reads what was there one update ago."""
    return max(group - 1, 0)


@dataclass
class Rules:
    """Stages that are trained by one of the rules.

    Attributes:
        stages: with the newest weights.
        optimizer: of all.
        reads: the rule.
        group: microbatches of an update.
        losses: of all microbatches, in their order.
    """

    stages: Sequence[nn.Module]
    optimizer: Optimizer
    reads: Reads
    group: int
    loss_fn: LossFn
    losses: list[Tensor] = field(default_factory=list)
    versions: list[list[nn.Module]] = field(default_factory=list)
    num_groups: int = 0

    def start(self) -> None:
        """With a pipeline that is empty."""
        self.versions = [[copy.deepcopy(stage)] for stage in self.stages]
        self.num_groups = 0

    def batch(self, x: Tensor, target: Tensor, rows: Sequence[int], seed: int = 0) -> None:
        """Trains on the microbatches of a batch. An update of none with rows changes nothing."""
        parts = list(zip(x.split(list(rows)), target.split(list(rows)), strict=True))
        for first in range(0, len(parts), self.group):
            of_group = parts[first : first + self.group]
            if any(len(part) for part, _ in of_group):
                self._update(of_group, first, seed)
            for stage, versions in zip(self.stages, self.versions, strict=True):
                versions.append(copy.deepcopy(stage))
            self.num_groups += 1

    def _update(self, parts: Sequence[tuple[Tensor, Tensor]], first: int, seed: int) -> None:
        count = len(self.stages)
        read = [self.versions[s][self.reads(self.num_groups, s, count)] for s in range(count)]
        total = sum(len(part) for part, _ in parts)
        for stage, version in zip(self.stages, read, strict=True):
            version.zero_grad()
            # Buffers have one version, whoever writes them.
            for buffer, other in zip(stage.buffers(), version.buffers(), strict=True):
                other.copy_(buffer)
        for index, (x, target) in enumerate(parts):
            if len(x) == 0:
                continue
            value = x
            for number, version in enumerate(read):
                torch.manual_seed(action_seed(seed, number, first + index))
                value = version(value)
            loss = self.loss_fn(value, target)
            self.losses.append(loss.detach())
            (loss * (len(x) / total)).backward()
        for stage, version in zip(self.stages, read, strict=True):
            for parameter, other in zip(stage.parameters(), version.parameters(), strict=True):
                parameter.grad = None if other.grad is None else other.grad.clone()
            for buffer, other in zip(stage.buffers(), version.buffers(), strict=True):
                buffer.copy_(other)
        self.optimizer.step()
        self.optimizer.zero_grad()
