"""Streams of batches with torch's own engine. Run by test_device_oracle.py."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.runtime.gpu.ring_transport import RingTransport
from tests.device_oracle.oracle import counts
from tests.device_oracle.steps_on_gpus import FOUR, TWO, WIDTH, mlp
from tests.fake_cuda.fake import FakeCuda


def test_a_stream_of_batches(four_gpus: FakeCuda) -> None:
    """The caller makes each batch right before it is fed, and reads each output."""
    layers = mlp()
    plain = copy.deepcopy(layers)
    batches = [torch.randn(16, WIDTH) for _ in range(5)]
    with pykern.Pipeline(layers, devices=TWO, microbatches=4) as pipe, torch.no_grad():
        made = (batch.to("cuda:0") * 2 for batch in batches)
        for output, batch in zip(pipe.stream(made), batches, strict=True):
            expected = torch.cat([plain(part * 2) for part in batch.split(4)])
            assert torch.equal((output + 1).cpu(), expected + 1)


def test_an_output_of_a_stream_does_not_wait_for_later_batches(four_gpus: FakeCuda) -> None:
    """The third batch has been issued by then, and its last operation does not end."""
    issued: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(3):
            issued.append(counts().kernels)
            if len(issued) == 3:
                # Each batch takes as many operations as the one before.
                four_gpus.hang("fake_kernel", issued[2] - issued[1])
            yield torch.randn(16, WIDTH, device="cuda:0")

    with pykern.Pipeline(mlp(), devices=TWO, microbatches=2) as pipe, torch.no_grad():
        pipe(torch.randn(16, WIDTH))
        stream = pipe.stream(batches())
        gpu = next(stream).get_device()
        assert len(issued) == 3
        assert four_gpus.complete(four_gpus.default_stream(gpu))
        four_gpus.library.fake_let_go(1)
        assert len(list(stream)) == 2


def test_an_output_may_be_read_on_a_stream_that_later_batches_do_not_wait_for(
    four_gpus: FakeCuda,
) -> None:
    """The caller lets go of each output while the read is under way."""
    aside = torch.cuda.Stream(1)
    batches = (torch.randn(16, WIDTH, device="cuda:0") for _ in range(6))
    with pykern.Pipeline(mlp(), devices=TWO, microbatches=4) as pipe, torch.no_grad():
        pipe(torch.randn(16, WIDTH))
        aside.wait_stream(torch.cuda.current_stream(1))
        stream = pipe.stream(batches)
        for _ in range(3):
            with torch.cuda.stream(aside):
                next(stream) + 1
            next(stream)


class Arguments(nn.Module):
    """The last of its stages alone uses an argument, which a graph saves, or none does."""

    def __init__(self, *, saves: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.saves = saves

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + 1)
        return x * by if self.saves else x + by


def load_aside(*_: object) -> None:
    """Another thread of the caller's loads tensors like those of the batch, and drops them."""

    def load() -> None:
        for gpu in range(4):
            _ = [torch.zeros(4, WIDTH, device=f"cuda:{gpu}") for _ in range(16)]

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "options", [{"devices": FOUR}, {"devices": FOUR, "replicas": 2}, {"devices": TWO}], ids=str
)
def test_other_threads_get_no_memory_of_the_batch_within_a_step(
    four_gpus: FakeCuda, options: dict[str, Any]
) -> None:
    """Their streams are the caller's, which wait for the step at its end alone."""
    model = Arguments(saves=False)
    sample = torch.randn(2, 16, WIDTH)
    batch = sample.to("cuda:0").unbind()
    with pykern.Pipeline(
        model, microbatches=4, loss_fn=torch.sum, sample=tuple(sample), **options
    ) as pipe:
        pipe.step(*batch)
        model.get_parameter("layers.3.bias").register_hook(load_aside)
        pipe.step(*batch)


def test_nor_within_the_backward_of_a_call(
    four_gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = RingTransport.back

    def noted(*arguments: Any) -> Any:
        load_aside()
        return back(*arguments)

    monkeypatch.setattr(RingTransport, "back", noted)
    sample = torch.randn(2, 16, WIDTH)
    with pykern.Pipeline(
        Arguments(saves=True), devices=FOUR, microbatches=4, sample=tuple(sample)
    ) as pipe:
        pipe(*sample.to("cuda:0").unbind()).sum().backward()
