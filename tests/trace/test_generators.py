"""A recorded forward would draw once and for ever, unless torch draws."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import CutError

WIDTH, ROWS = 8, 4
KEPT = np.random.default_rng(0)

OLD = np.random.RandomState(0)

Draw = Callable[[Any], Any]


class Noisy(nn.Module):
    """Multiplies by what it draws."""

    def __init__(self, draw: Draw | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw = draw
        self.of_numpy, self.of_python = np.random.default_rng(0), random.Random(0)
        self.of_torch = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x if self.draw is None else x * self.draw(self)


class Outer(Noisy):
    """Blocks, and then the same."""

    def __init__(self, draw: Draw | None = None, within: Draw | None = None) -> None:
        super().__init__(draw)
        self.blocks = nn.ModuleList(Noisy(within) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


def _branch(_: nn.Module) -> float:
    return 2.0 if random.random() < 0.5 else 1.0


DRAWS: dict[str, tuple[Draw, str]] = {
    "numpy": (lambda _: np.random.rand(), r"numpy\.random"),
    "numpy, as a tensor": (
        lambda _: torch.from_numpy(np.random.rand(WIDTH)).float(),
        r"numpy\.random",
    ),
    "numpy's old kind": (lambda _: OLD.rand(), "OLD"),
    "Python": (lambda _: random.random(), "Python's random"),
    "a branch": (_branch, "Python's random"),
    "numpy, kept": (lambda module: module.of_numpy.random(), r"Outer\.of_numpy"),
    "Python, kept": (lambda module: module.of_python.random(), r"Outer\.of_python"),
    "numpy, of the file": (lambda _: KEPT.random(), "KEPT"),
    "numpy, in an expression": (lambda _: sum(KEPT.random() for _ in range(2)), "KEPT"),
}


def pipeline(model: nn.Module) -> pykern.Pipeline:
    sample = torch.randn(ROWS // 2, WIDTH)
    return pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss, sample=sample
    )


def losses(pipe: pykern.Pipeline) -> set[float]:
    """The losses of four steps with one batch."""
    x = torch.ones(ROWS, WIDTH)
    with pipe:
        return {float(pipe.step(x, target=x)) for _ in range(4)}


@pytest.mark.parametrize("way", DRAWS)
def test_a_forward_that_draws_without_torch_is_refused(way: str) -> None:
    """Every step had the numbers of the sample."""
    draw, name = DRAWS[way]
    with pytest.raises(CutError, match=rf"draws random numbers from {name} \(test_gen.*\.py:\d+"):
        pipeline(Outer(draw))


def test_a_draw_that_nothing_is_computed_with_is_refused_at_the_end() -> None:
    class Drawing(Outer):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
            return super().forward(x), random.random()

    with pytest.raises(CutError, match=r"from Python's random \(its end, or before it\)"):
        pipeline(Drawing())


@pytest.mark.parametrize("way", ["numpy", "Python", "numpy, kept", "Python, kept"])
def test_modules_that_stay_whole_draw_anew(way: str) -> None:
    assert len(losses(pipeline(Outer(within=DRAWS[way][0])))) == 4


def test_torch_draws_anew() -> None:
    assert len(losses(pipeline(Outer(lambda _: torch.rand(()))))) == 4


def test_a_forward_that_comes_to_draw_later_is_refused() -> None:
    class Training(Outer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x * random.random() if self.training else x

    x = torch.randn(ROWS, WIDTH)
    with pipeline(Training().eval()) as pipe:
        pipe(x)
        pipe.train()
        with pytest.raises(CutError, match="draws random numbers from Python's random"):
            pipe.step(x, target=x)


def test_a_recording_leaves_no_trace_in_generators() -> None:
    def draw(module: Any) -> float:
        own = module.of_numpy.random() + module.of_python.random()
        own += torch.rand((), generator=module.of_torch).item()
        return float(own + np.random.rand() + random.random() + OLD.rand())

    def states(model: Any) -> list[Any]:
        """The next draw of each generator."""
        numpys = [block.of_numpy.bit_generator.state for block in model.blocks]
        torchs = [block.of_torch.get_state().tolist() for block in model.blocks]
        pythons = [block.of_python.getstate() for block in model.blocks]
        olds = [np.random.get_state(), OLD.get_state()]
        return [numpys, torchs, pythons, random.getstate(), [str(old) for old in olds]]

    model = Outer(within=draw)
    before = states(model)
    pipeline(model).close()
    assert states(model) == before
    model(torch.randn(ROWS, WIDTH))
    assert all(now != then for now, then in zip(states(model), before, strict=True))
