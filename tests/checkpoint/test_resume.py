"""A run that was saved goes on elsewhere as if it had never stopped, bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from pykern import checkpoint
from tests.checkpoint.runs import Run, pipelined, plain, same


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ckpt"


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def went_on(file, first: Run) -> tuple[object, list[torch.Tensor], object]:
    """The first half of a run, saved; then the states there and its second half's results."""
    seed(7)
    first.train(3)
    checkpoint.save(file, **first.parts(), extra={"epoch": 3, "best": (0.1, None)})
    there = first.states()
    losses = first.train(4)
    after = first.states()
    first.close()
    return there, losses, after


def expect_same(file, run: Run, there: object, losses: object, after: object) -> None:
    seed(99)
    extra = checkpoint.load(file, **run.parts())
    assert extra == {"epoch": 3, "best": (0.1, None)}
    assert same(run.states(), there)
    assert same(run.train(4), losses)
    assert same(run.states(), after)
    run.close()


def test_a_run_on_four_devices_goes_on_on_any_number_and_without_pykern(file):
    expected = went_on(file, pipelined("cpu:4"))
    for devices in (1, 2, 3, 8):
        expect_same(file, pipelined(f"cpu:{devices}"), *expected)
    expect_same(file, plain(), *expected)


def test_a_plain_run_goes_on_in_a_pipeline(file):
    expected = went_on(file, plain())
    expect_same(file, pipelined("cpu:2"), *expected)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("gpipe", {}), ("hanayo", {"waves": 2}), ("zb_h1", {}), ("interleaved", {"num_chunks": 2})],
)
def test_a_run_goes_on_under_another_schedule(file, schedule, options):
    expected = went_on(file, pipelined("cpu:2"))
    expect_same(file, pipelined("cpu:2", schedule=schedule, **options), *expected)


def test_dropout_goes_on_where_there_are_as_many_stages(file):
    expected = went_on(file, pipelined("cpu:2", dropout=0.3, schedule="hanayo"))
    expect_same(file, pipelined("cpu:4", dropout=0.3, schedule="gpipe"), *expected)


def test_a_run_goes_on_on_gpus(file, gpus):
    expected = went_on(file, pipelined("cpu:4"))
    expect_same(file, pipelined("cuda"), *expected)


def test_tensors_under_names_that_are_no_utf8(tmp_path):
    """Python's names of files have lone surrogates where their bytes are of another encoding."""
    model, file = nn.Module(), tmp_path / "run.ckpt"
    model.register_buffer("\ud800", torch.ones(1))
    extra = {"\ud800": torch.zeros(2), "\\ud800": torch.ones(2)}
    checkpoint.save(file, model, extra=extra)
    model.register_buffer("\ud800", torch.zeros(1))
    torch.testing.assert_close(checkpoint.load(file, model), extra)
    assert model.get_buffer("\ud800") == 1
