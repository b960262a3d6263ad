"""Cutting batches and joining results."""

from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pykern import SplitError
from pykern.runtime.microbatch import batch_size, merge, sizes, split, to_device

Point = namedtuple("Point", ["x", "y"])
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@given(rows=st.integers(1, 200), parts=st.integers(1, 40))
def test_sizes_are_even_and_complete(rows: int, parts: int) -> None:
    found = sizes(rows, parts)
    assert len(found) == parts
    assert sum(found) == rows
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@given(
    rows=st.integers(1, 12),
    parts=st.integers(1, 8),
    build=st.recursive(
        st.sampled_from(["tensor", "integers", "empty"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
            st.tuples(inner, inner),
        ),
        max_leaves=6,
    ),
)
def test_merge_undoes_split(rows: int, parts: int, build: Any) -> None:
    tree = (torch.arange(rows), materialise(build, rows))
    cut = split(tree, sizes(rows, parts))[:rows]  # without those that have no rows
    assert_same(merge(cut, [1.0] * len(cut)), tree)


def materialise(build: Any, rows: int) -> Any:
    if isinstance(build, str):
        shape = {"tensor": (rows, 3), "integers": (rows,), "empty": (rows, 0, 2)}[build]
        return torch.randn(shape) if build != "integers" else torch.arange(rows)
    if isinstance(build, dict):
        return {key: materialise(value, rows) for key, value in build.items()}
    return type(build)(materialise(value, rows) for value in build)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def test_what_has_no_rows_is_given_to_all() -> None:
    scale = torch.tensor(2.0)
    parts = split(Point(torch.arange(4), {"scale": scale, "name": "n", "none": None}), [2, 2])
    assert [part.x.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(part.y["scale"] is scale and part.y["name"] == "n" for part in parts)
    assert isinstance(parts[0], Point)


def test_values_that_agree_are_kept() -> None:
    assert merge([(torch.ones(1), 3, None)] * 2, [0.5, 0.5])[1:] == (3, None)


def test_numbers_count_by_weight() -> None:
    parts = [{"loss": torch.tensor(2.0)}, {"loss": torch.tensor(4.0)}]
    assert merge(parts, [0.75, 0.25]) == {"loss": torch.tensor(2.5)}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            (torch.ones(4), {"mask": torch.ones(3, 2)}),
            r"\[1\]\['mask'\] must have as many rows .*, 4, got 3",
        ),
        (
            (3, "text", torch.tensor(1.0)),
            "the batch must hold a tensor with a dimension 0 to cut into microbatches, got none",
        ),
        ((torch.ones(0, 3),), "the batch must have at least 1 row, got 0"),
        ((torch.ones(2, 3).to_sparse(),), r"must be dense, got a torch.sparse_coo one.*to_dense"),
        (
            (torch.ones(4), SimpleNamespace(weight=torch.ones(4))),
            r"must be in tuples, .*, got a SimpleNamespace with shape \(4,\)",
        ),
        (
            {"inputs": (torch.ones(4), UserDict(a=torch.ones(4)))},
            "got a UserDict with shape",
        ),
        (UserDict(a=torch.ones(4)), r"got a UserDict with shape \(4,\).*dict\(...\)"),
        (
            {"inputs": (torch.ones(4),), "named": {"bias": torch.ones(3)}},
            "^bias must have as many rows",
        ),
        ((NESTED,), r"must be dense, got a nested one.*to_padded_tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_named(tree: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        batch_size(tree)


def test_objects_without_rows_of_the_batch_go_to_all() -> None:
    class Rotary:
        table = None

        def __init__(self, rows: int) -> None:
            self.table = torch.ones(rows)

    assert batch_size((torch.ones(4), Rotary(3), object(), print)) == 4
    assert batch_size((torch.ones(1), Rotary(1))) == 1


def test_objects_of_a_batch_are_only_looked_at() -> None:
    class Handle:
        def __copy__(self) -> "Handle":
            raise AssertionError("copied")

        def __init__(self) -> None:
            self.mine = self
            self.words = dict.fromkeys(map(str, range(1000)), torch.ones(4))

    assert batch_size((torch.ones(4), Handle())) == 4


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.tensor(1)] * 2, "without dimensions"),
        ([(torch.ones(1), 1), (torch.ones(1), 2)], "int that differs"),
        (
            [(torch.ones(1),), [torch.ones(1)]],
            "the outputs of all microbatches must have one structure to be joined, got "
            "different ones",
        ),
    ],
)
def test_results_that_cannot_be_joined_are_named(parts: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        merge(parts, [1.0] * len(parts))


def test_to_device_moves_the_tensors_of_a_tree() -> None:
    meta = torch.device("meta")
    there = torch.ones(2, device=meta)
    tree = (torch.ones(2), {"a": [there, "b"]}, Point(torch.ones(3), 4), None)
    moved = to_device(tree, meta)
    assert moved[0].device == moved[2].x.device == meta
    assert moved[1]["a"][0] is there
    assert (moved[1]["a"][1], moved[2].y, moved[3]) == ("b", 4, None)
    here = torch.ones(2)
    assert to_device(here, torch.device("cpu")) is here
