"""Stages of recorded forwards as straight code: the bits of the general way, which they replace."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from pykern.runtime.stage import straight_tape
from pykern.runtime.stage.stage import Stage
from tests.runtime.plans import late_weights, split_some, two_replicas

WIDTH, ROWS = 6, 8


def linears(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Skipping(nn.Module):
    """Values of two blocks go past the next one, to the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears()

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        y = first(x)
        kept, doubled = torch.sin(y), y * 2
        z = second(y)
        out: Tensor = last(third(z) + 1) * doubled + torch.add(z, kept)
        return out


class Drawing(Skipping):
    """Draws in three of its stages."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        y = F.dropout(first(x), 0.5)
        z = third(F.dropout(second(y), 0.3))
        out: Tensor = F.dropout(last(z), 0.5) + y
        return out


class Pair(nn.Module):
    """Stays whole, and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        return self.linear(x) * scale, None


class Odd(nn.Module):
    """Instructions of all kinds: several results, writes, buffers, masks, one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears()
        self.pair = Pair()
        self.same = nn.Identity()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        mask = x > 0
        y = first(x)
        again = self.same(y)
        kept = torch.cos(y)
        z, _ = self.pair(second(y) + torch.sin(y))
        z.relu_()
        left, right = third(z + again).chunk(2, dim=1)
        # From an earlier stage.
        kept.add_(1)
        joined = torch.cat([right, left], dim=1) * self.scale
        out: Tensor = last(joined.masked_fill(mask, 0.25)) + y * kept
        return out


class Frozen(Skipping):
    """The first stages have no backward, and all is written with arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        y = first(x)
        z = second(input=y)
        out: Tensor = torch.add(last(third(z)), y, alpha=2)
        return out


class InPlace(Skipping):
    """Begins each stage with a module that works in place, on values that others read as well."""

    def __init__(self) -> None:
        super().__init__()
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(())
        for relu, block in zip(self.relus, self.blocks, strict=True):
            kept = kept + torch.sigmoid(x)
            x = block(relu(x))
        return x + kept


class InDict(Skipping):
    """Returns a dict."""

    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x), "rows": len(x)}


def loss_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["out"] if isinstance(output, dict) else output, target)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "skipping": Skipping,
    "drawing": Drawing,
    "odd": Odd,
    "frozen": Frozen,
    "in place": InPlace,
    "in dict": InDict,
}
PLANS: dict[str, Plan] = {
    "one worker": schedules.interleaved(1, 4, 4),
    "1f1b": schedules.one_f_one_b(4, 4),
    "zero bubble": schedules.zb_h1(4, 4),
    "some split": split_some(schedules.one_f_one_b(4, 4)),
    "late weights": late_weights(schedules.one_f_one_b(4, 4)),
    "two replicas": two_replicas(4, 4),
}


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By step and replica, whether stages ran straight code."""
    found: list[bool] = []
    enter = straight_tape.enter

    def noted(stages: Sequence[Stage], arguments: Any) -> None:
        before = [stage.bare_forward for stage in stages]
        enter(stages, arguments)
        now = [stage.bare_forward for stage in stages]
        changed = [one is not other for one, other in zip(before, now, strict=True)]
        assert len(set(changed)) == 1
        found.append(changed[0])

    monkeypatch.setattr(straight_tape, "enter", noted)
    return found


def steps(model: nn.Module, plan: Plan, count: int, rows: int = ROWS) -> list[Any]:
    """The losses, gradients and outputs of some steps."""
    found: list[Any] = []
    torch.manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH)
    with pykern.Pipeline(
        model,
        devices=f"cpu:{plan.num_devices}",
        schedule=plan,
        loss_fn=loss_of,
        sample=x[: rows // plan.num_microbatches],
        split_at=[f"blocks.{number}" for number in (1, 2, 3)],
    ) as pipe:
        for _ in range(count):
            found.append(pipe.step(x, target=y))
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for _ in range(2):
            with torch.no_grad():
                output = pipe(x)
            found.append(output["out"] if isinstance(output, dict) else output)
    return found


def assert_equal(one: Sequence[Any], other: Sequence[Any]) -> None:
    for mine, others in zip(one, other, strict=True):
        assert (mine is None) == (others is None)
        assert mine is None or torch.equal(mine, others)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_the_general_way(
    monkeypatch: pytest.MonkeyPatch, straight: list[bool], name: str, plan: str
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    found = steps(model, PLANS[plan], 4)
    # The first steps, and the first forward, are watched. All that follow run straight code.
    assert straight[-1]
    assert straight.count(True) >= 2 * PLANS[plan].placement.num_replicas

    monkeypatch.setattr(straight_tape, "enter", lambda stages, of: stages[0].enter(of))
    assert_equal(found, steps(twin, PLANS[plan], 4))


@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_modules_in_place_write_no_batch_and_no_value_of_another_stage(
    recompute: Any,
) -> None:
    torch.manual_seed(0)
    model = InPlace()
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices="cpu:4", schedule=schedules.one_f_one_b(4, 4), loss_fn=loss_of,
        sample=torch.randn(2, WIDTH), recompute=recompute,
    ) as pipe:  # fmt: skip
        for _ in range(3):
            x, y = torch.randn(2, ROWS, WIDTH)
            given = x.clone()
            pipe.step(x, target=y)
            assert torch.equal(x, given)
            for rows, target in zip(given.chunk(4), y.chunk(4), strict=True):
                (loss_of(plain(rows), target) / 4).backward()
            for mine, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, of_plain.grad)  # type: ignore[arg-type]


def test_microbatches_of_two_sizes_go_the_general_way(straight: list[bool]) -> None:
    torch.manual_seed(0)
    steps(Skipping(), PLANS["1f1b"], 4, rows=6)
    assert not any(straight)


def test_a_later_step_may_have_another_size(straight: list[bool]) -> None:
    """Each tape has functions of its own."""
    torch.manual_seed(0)
    model = Skipping()
    twin = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices="cpu:2", schedule=schedules.one_f_one_b(2, 2), loss_fn=loss_of,
        sample=torch.randn(2, WIDTH),
    ) as pipe:  # fmt: skip
        for rows in (4, 4, 4, 8, 4, 8):
            x, y = torch.randn(2, rows, WIDTH)
            loss = pipe.step(x, target=y)
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            expected = [loss_of(twin(a), b) for a, b in halves]
            assert torch.equal(loss, expected[0].detach() / 2 + expected[1].detach() / 2)
    assert straight[-3:] == [True] * 3


def test_a_step_lets_go_of_its_tensors_at_its_end(straight: list[bool]) -> None:
    """Nothing waits for the garbage collector."""
    held: list[weakref.ref[Tensor]] = []

    def noting(output: Tensor, target: Tensor) -> Tensor:
        held.append(weakref.ref(output))
        held.append(weakref.ref(target))
        return F.mse_loss(output, target)

    with pykern.Pipeline(
        Skipping(), devices="cpu:2", schedule=schedules.one_f_one_b(2, 2), loss_fn=noting,
        sample=torch.randn(2, WIDTH),
    ) as pipe:  # fmt: skip
        for _ in range(3):
            pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
        gc.collect()
        gc.disable()
        try:
            held.clear()
            pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
            assert straight[-1]
            assert len(held) == 4
            assert all(ref() is None for ref in held)
        finally:
            gc.enable()
