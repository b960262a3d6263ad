"""The demo's data: always the same, never shared between training and judging, refused if unfit."""

import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from pykern.demo.text import MAX_BYTES, batches, even_windows, standard_library, text_file

WINDOW = 9


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_standard_library_is_always_there_and_always_the_same() -> None:
    first, second = standard_library(WINDOW), standard_library(WINDOW)
    assert 100_000 < len(first.training) + len(first.held_out) <= MAX_BYTES
    assert torch.equal(first.training, second.training)
    assert b"import" in bytes(first.training.tolist())


def test_the_last_part_is_held_out(tmp_path: Path) -> None:
    data = bytes(range(1, 161))
    corpus = text_file(write(tmp_path / "a.txt", data), WINDOW)
    assert bytes(corpus.training.tolist()) == data[:150]
    assert bytes(corpus.held_out.tolist()) == data[150:]
    assert corpus.source == str(tmp_path / "a.txt")


def test_of_a_long_file_only_the_beginning_is_read(tmp_path: Path) -> None:
    corpus = text_file(write(tmp_path / "a.txt", b"a" * (MAX_BYTES + 5)), WINDOW)
    assert len(corpus.training) + len(corpus.held_out) == MAX_BYTES


def test_the_target_is_the_input_one_byte_on() -> None:
    text = torch.arange(1, 101, dtype=torch.uint8)
    for x, y in islice(batches(text, 4, WINDOW, seed=0), 20):
        assert x.shape == y.shape == (4, WINDOW - 1)
        assert x.dtype == torch.int64
        assert torch.equal(x + 1, y)


def test_the_seed_decides_the_batches() -> None:
    text = torch.arange(1, 201, dtype=torch.uint8)
    first, same, other = (next(batches(text, 4, WINDOW, seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_even_windows_reach_from_the_first_byte_to_the_last() -> None:
    x, y = even_windows(torch.arange(100, dtype=torch.uint8), 5, WINDOW)
    assert x.shape == (5, WINDOW - 1)
    assert (x[0, 0].item(), y[-1, -1].item()) == (0, 99)


def test_the_shortest_text_that_is_accepted_is_enough(tmp_path: Path) -> None:
    corpus = text_file(write(tmp_path / "a.txt", b"a" * 16 * WINDOW), WINDOW)
    next(batches(corpus.training, 2, WINDOW, seed=0))
    even_windows(corpus.held_out, 3, WINDOW)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must have at least 144 bytes of text, got 0"),
        (b"a" * 143, "must have at least 144 bytes of text, got 143"),
        (b"\x7fELF\0" * 100, r"is binary \(byte 0 at offset 4\)"),
    ],
)
def test_unfit_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_file(write(tmp_path / "a.txt", data), WINDOW)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must be a text file, got .*, which is a directory"):
        text_file(tmp_path, WINDOW)


def test_a_pipe_without_a_writer_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        text_file(tmp_path / "pipe", WINDOW)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        text_file(tmp_path / "absent.txt", WINDOW)
