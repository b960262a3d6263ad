"""Settings of all threads that a recorded forward changes around some of its calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pykern.torch_private import SharedSettings, shared_settings
from pykern.trace import Traced
from tests.trace.test_trace import num_tapes, replay


@contextmanager
def determinism() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a backend of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "an order of backends": lambda: sdpa_kernel(ORDER, set_priority=True),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "determinism": determinism,
    "a dtype": default_dtype,
}


class Looks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[SharedSettings] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(shared_settings())
        return super().forward(x)


class InABlock(nn.Module):
    def __init__(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.first, self.second, self.third = Looks(), Looks(), Looks()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.block():
            x = self.second(x)
            # Made of the default dtype.
            x = x * torch.arange(4.0).sqrt().to(x)
        return self.third(x)


def seen(model: InABlock) -> list[SharedSettings]:
    parts = (model.first, model.second, model.third)
    found = [part.seen[-1] for part in parts]
    for part in parts:
        part.seen.clear()
    return found


# torch warns of its own block without a GPU of Intel's.
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_replay_has_the_settings_that_the_forward_sets(name: str) -> None:
    model, x = InABlock(BLOCKS[name]), torch.randn(2, 4)
    output, around = model(x), shared_settings()
    plain = seen(model)
    assert plain[0] == plain[2] == around != plain[1]
    traced = Traced(model, ((x,), {}), 3)
    assert torch.equal(replay(traced, x), output)
    assert seen(model) == plain
    assert shared_settings() == around


def test_settings_around_a_forward_are_those_of_its_replay() -> None:
    model, x = InABlock(BLOCKS["cudnn"]), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    with sdpa_kernel(SDPBackend.MATH):
        model(x)
        plain = seen(model)
        replay(traced, x)
        assert seen(model) == plain
    replay(traced, x)
    assert num_tapes(traced) == 2
    assert seen(model)[0] == shared_settings()


def test_a_call_that_fails_leaves_the_settings_as_they_were() -> None:
    model, x = InABlock(BLOCKS["a backend of attention"]), torch.randn(2, 4)
    traced, around = Traced(model, ((x,), {}), 3), shared_settings()

    def fails(*_: Any) -> None:
        raise ValueError("planted")

    model.second.forward = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="planted"):
        replay(traced, x)
    assert shared_settings() == around
