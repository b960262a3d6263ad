"""Streams of batches with torch's own engine. Run by test_device_oracle.py."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

import pykern
from tests.device_oracle.oracle import counts
from tests.device_oracle.steps_on_gpus import TWO, WIDTH, mlp
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
