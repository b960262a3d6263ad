"""Settings of all threads that layers change for a block while stages run at the same time."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pykern
from pykern.torch_private import shared_settings

LIMIT_S = 60


class Overlapping(nn.Module):
    """Is within its block when the next stage enters its own, and leaves before that one does."""

    def __init__(self, mine: int, entered: list[threading.Event], left: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mine, self.entered, self.left = mine, entered, left
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # The second microbatch of the first stage meets the first one of the second stage.
        if self.calls != (2 if self.mine == 0 else 1):
            return self.linear(x)
        first, second = self.entered
        if self.mine == 1:
            assert first.wait(LIMIT_S)
        with sdpa_kernel(SDPBackend.MATH):
            self.entered[self.mine].set()
            if self.mine == 0:
                assert second.wait(LIMIT_S)
            else:
                assert self.left.wait(LIMIT_S)
        if self.mine == 0:
            self.left.set()
        return self.linear(x)


def overlapping() -> nn.Sequential:
    entered, left = [threading.Event(), threading.Event()], threading.Event()
    return nn.Sequential(Overlapping(0, entered, left), Overlapping(1, entered, left))


def test_blocks_that_overlap_leave_the_settings_as_they_were() -> None:
    before = shared_settings()
    x = torch.randn(4, 4)
    with pykern.Pipeline(
        overlapping(), devices="cpu:2", microbatches=2, schedule="gpipe", loss_fn=F.mse_loss
    ) as pipe:
        with pytest.warns(UserWarning, match="layers changed sdpa_kernel while stages") as told:
            pipe.step(x, target=x)
        assert shared_settings() == before
        assert [one.filename for one in told] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(x, target=x)
    assert shared_settings() == before


def test_a_step_that_fails_tells_its_error_and_keeps_the_settings() -> None:
    class Fails(nn.Linear):
        def forward(self, _: Tensor) -> Tensor:
            torch.backends.cuda.enable_math_sdp(False)
            raise ValueError("planted")

    before, x = shared_settings(), torch.randn(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), Fails(4, 4))
    with (
        pykern.Pipeline(model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="planted"):
            pipe.step(x, target=x)
    assert shared_settings() == before


def test_one_worker_leaves_what_a_layer_sets_as_in_the_model() -> None:
    class Sets(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.backends.cuda.enable_math_sdp(False)
            return super().forward(x)

    x = torch.randn(4, 4)
    try:
        with pykern.Pipeline(
            nn.Sequential(Sets(4, 4)), devices="cpu:1", microbatches=2, loss_fn=F.mse_loss
        ) as pipe:
            pipe.step(x, target=x)
        assert not torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_math_sdp(True)
