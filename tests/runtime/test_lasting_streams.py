"""Streams go from pipeline to pipeline, since torch keeps memory for every stream it has seen."""

import gc
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern
from pykern import _C
from pykern.runtime.gpu.streams import Streams
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import unchecked_gpus

CREATED = "cuStreamCreateWithPriority"


def pipeline(**options: Any) -> pykern.Pipeline:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    usual: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}
    return pykern.Pipeline(layers, **(usual | options), loss_fn=mse_loss)


def train(pipe: pykern.Pipeline) -> None:
    for _ in range(3):
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    pipe(torch.randn(8, 4))


def lanes_of(pipe: pykern.Pipeline) -> _C.Lanes:
    driver = pipe._executor.driver
    assert isinstance(driver, Streams)
    return driver.gpus.lanes


@pytest.mark.parametrize("capture", [False, True])
def test_pipelines_in_a_row_make_the_streams_of_one(
    monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    of_test = []
    stream = FakeCuda.stream

    def counted(fake: FakeCuda, device: int) -> int:
        of_test.append(device)
        return stream(fake, device)

    monkeypatch.setattr(FakeCuda, "stream", counted)
    made = []
    with unchecked_gpus(2) as fake:
        for _ in range(20):
            with pipeline(capture=capture) as pipe:
                train(pipe)
            del pipe
            gc.collect()
            made.append(fake.calls(CREATED) - len(of_test))
    assert made[0] > 0
    assert made == made[:1] * 20


def handles(lanes: _C.Lanes) -> tuple[list[int], list[int]]:
    gpus = range(len(lanes))
    return [lanes.compute(gpu) for gpu in gpus], [lanes.ring(gpu) for gpu in gpus]


def test_pipelines_that_live_share_no_stream(fake_cuda: FakeCuda) -> None:
    names = [(0, 0, 1), (1, 0, 1)]
    one, other = _C.Lanes(names), _C.Lanes(names)
    compute, rings = handles(one)
    assert len({*compute, *rings, *chain(*handles(other))}) == 8
    one.close()
    third = _C.Lanes(names)
    # A ring's stream never computes: torch would give the ring memory that kernels may still use.
    assert handles(third) == (compute, rings)
    with pytest.raises(IndexError):
        one.compute(0)


def test_a_closed_pipeline_has_left_its_streams() -> None:
    with unchecked_gpus(2):
        kept, found = [], []
        for _ in range(3):
            kept.append(pipeline())
            train(kept[-1])
            found.append(handles(lanes_of(kept[-1])))
            kept[-1].close()
        assert found == found[:1] * 3
        del kept


def test_groups_of_multiprocessors_have_streams_of_their_own(fake_cuda: FakeCuda) -> None:
    """A split of a GPU ends with its pipeline, and its streams with the split."""
    created = []
    for _ in range(2):
        lanes = _C.Lanes([(0, 0, 2), (0, 1, 2)])
        created.append(fake_cuda.calls("cuGreenCtxStreamCreate"))
        lanes.close()
        del lanes
    assert created == [2, 4]
