"""Trees are opened in one way, by whatever function, and put together as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pykern.tensors.trees import all_tensors, flatten, leaves, opened, unflatten

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Held:
    tensor: Tensor
    name: str


class Unknown:
    """Nothing that torch opens."""


ONE, OTHER = torch.ones(2), torch.zeros(3)
UNKNOWN = Unknown()
TREES: dict[str, Any] = {
    "tensor": ONE,
    "number": 3,
    "nothing": None,
    "unknown": UNKNOWN,
    "tuple": (ONE, OTHER, None, 2.0),
    "empty": (),
    "one tensor twice": [ONE, ONE],
    "dict": {"b": ONE, "a": OTHER},
    "ordered": OrderedDict(b=ONE, a=OTHER),
    "default": defaultdict(list, b=ONE),
    "deque": deque([ONE, 1], maxlen=4),
    "named": Pair(ONE, OTHER),
    "sizes": torch.max(torch.ones(2, 2), dim=1),
    "dataclass": Held(ONE, "name"),
    "unknown inside": (ONE, UNKNOWN),
    "deep": [ONE, {"a": (OTHER, [])}, Pair(Held(ONE, "name"), deque([OTHER]))],
}


@pytest.mark.parametrize("name", TREES)
def test_all_functions_give_the_same_leaves(name: str) -> None:
    tree = TREES[name]
    expected, spec = flatten(tree)
    found, together = opened(tree)
    assert list(map(id, leaves(tree))) == list(map(id, found)) == list(map(id, expected))
    assert all_tensors(tree) == [leaf for leaf in expected if isinstance(leaf, Tensor)]
    # Other leaves give a tree of the same structure.
    others = list(range(len(found)))
    mine, of_torch = together(others), unflatten(others, spec)
    assert type(mine) is type(of_torch)
    assert repr(mine) == repr(of_torch)
