"""Models with a forward of their own in four stages, and steps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
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


def steps(
    model: nn.Module, plan: Plan, count: int, rows: int = ROWS, recompute: Any = None
) -> list[Any]:
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
        recompute=recompute,
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
