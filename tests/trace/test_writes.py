"""Stages that write into memory of the batch or of earlier stages, by its own or another name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import CutError

WIDTH = 6


class Parts(nn.Module):
    """Three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class WritesView(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = torch.sin(y)
        z = self.second(y)
        kept[:, :2].mul_(3)
        out: Tensor = self.third(z + kept)
        return out


class WritesColumns(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = torch.sin(y)
        z = self.second(y)
        for place in range(2):
            part = kept[:, place]
            part += place + 1
        kept.mul_(2)
        out: Tensor = self.third(z) * kept
        return out


class WritesRowsOfBatch(Parts):
    """Nothing else uses the batch, which gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x[0].mul_(2)
        rows = x.view(-1, WIDTH)
        out: Tensor = self.third(self.second(self.first(rows)))
        return out


class WritesBehindView(Parts):
    """Uses a view that the stage made before it wrote."""

    def forward(self, x: Tensor) -> Tensor:
        half = x[:, :2]
        x *= 2
        out: Tensor = self.third(self.second(self.first(x))) + half.sum()
        return out


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(
    "kind",
    [WritesView, WritesColumns, WritesRowsOfBatch, WritesBehindView],
)
def test_writes_by_any_name_are_those_of_the_plain_model(
    kind: type[nn.Module], num_stages: int, recompute: Any
) -> None:
    """Torch refused to write into a view of what had come in; a batch was written twice."""
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    x, target = torch.randn(2, 4, WIDTH)
    before = x.clone()
    with pykern.Pipeline(
        model,
        devices=f"cpu:{num_stages}",
        microbatches=2,
        loss_fn=F.mse_loss,
        sample=x[:2],
        split_at=["second", "third"][: num_stages - 1],
        recompute=recompute,
    ) as pipe:
        for _ in range(4):
            loss = pipe.step(x, target=target)
            parts = zip(x.clone().split(2), target.split(2), strict=True)
            losses = [F.mse_loss(plain(part.clone()), goal) / 2 for part, goal in parts]
            for one in losses:
                one.backward()
            assert torch.equal(loss, losses[0] + losses[1])
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                assert torch.equal(mine.grad, other.grad)
    assert torch.equal(x, before)


class WritesByModule(Parts):
    """Its first module is of a kind that often works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        out: Tensor = self.third(self.second(self.first(h)) + h)
        return out


class WritesCompiled(WritesByModule):
    def __init__(self) -> None:
        super().__init__()
        self.start.compile(backend="eager")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        WritesView,
        WritesColumns,
        WritesRowsOfBatch,
        WritesBehindView,
        WritesByModule,
        WritesCompiled,
    ],
)
def test_predictions_leave_the_batch_as_it_is(
    kind: type[nn.Module], num_stages: int, mode: Any
) -> None:
    """Tensors of inference mode count no writes: a batch was written where its values showed."""
    model = kind()
    with (
        mode(),
        pykern.Pipeline(
            model,
            devices=f"cpu:{num_stages}",
            microbatches=2,
            sample=torch.randn(2, WIDTH),
            split_at=["second", "third"][: num_stages - 1],
        ) as pipe,
    ):
        # The first batch has no values that rectifying would change.
        for x in (torch.rand(4, WIDTH), torch.randn(4, WIDTH)):
            before = x.clone()
            found = pipe(x)
            assert torch.equal(x, before)
            assert torch.equal(found, torch.cat([model(part) for part in before.split(2)]))


class WritesUnderView(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.first(x))
        half = y[:, :2]
        z = self.second(y)
        y += 1
        out: Tensor = self.third(z) * y + half.sum()
        return out


class WritesWhatOthersUse(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).mul_(2)
        out: Tensor = self.third(self.second(self.first(x)) + x)
        return out


@pytest.mark.parametrize(
    ("kind", "whose"),
    [
        (WritesUnderView, "in stage 1, writes into a tensor of stage 0"),
        (WritesWhatOthersUse, "in stage 0, writes into an argument"),
    ],
)
def test_writes_that_other_stages_would_not_see_are_refused(
    kind: type[nn.Module], whose: str
) -> None:
    with pytest.raises(CutError, match=rf"test_writes\.py:\d+, {whose} of which a view"):
        pykern.Pipeline(
            kind(),
            devices="cpu:3",
            microbatches=2,
            sample=torch.randn(2, WIDTH),
            split_at=["second", "third"],
        )
    report = pykern.explain_cut(kind(), torch.randn(2, WIDTH), split_at=["second", "third"])
    # Two stages are refused where three are, and the report has no such place in its table.
    assert re.search(rf"^no stage can begin with second: .*, {whose} of which a view", report, re.M)
    assert not re.search(r"^second", report, re.M)
    with pytest.raises(CutError, match=whose):
        pykern.Pipeline(
            kind(),
            devices="cpu:2",
            microbatches=2,
            sample=torch.randn(2, WIDTH),
            split_at=["second"],
        )
