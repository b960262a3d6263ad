"""The contents of modules' attributes are put back, in the same objects."""

import random
import threading
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pykern.trace import Traced, contents
from pykern.trace.contents import HeldContents, holders_of
from pykern.trace.kept_state import KeptState

WIDTH = 4


@dataclass
class Options:
    """An object of a user's class."""

    calls: int = 0
    seen: list[int] = field(default_factory=list)


class LeastRecent(OrderedDict[str, int]):
    """A cache that is full."""

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self.popitem(last=False)


def recent() -> OrderedDict[str, int]:
    return OrderedDict(one=1, two=2)


def set_recent(held: OrderedDict[str, int]) -> None:
    held.move_to_end("one")


class Stateful(nn.Module):
    """Keeps something, and changes it in each forward."""

    buffer: Tensor
    other: Any

    def __init__(self, kept: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.zeros(2))
        self.kept, self.change = kept, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.kept)
        return self.linear(x)


class Around(nn.Module):
    """A forward of its own, around a module that stays whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.inner(self.before(x)))
        return y


# A value that is kept, and how a forward changes it.
CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "tensor": (torch.zeros(2), lambda kept: kept.add_(1)),
    "tensor, by data": (torch.zeros(2), lambda kept: kept.data.fill_(1)),
    "tensor of a graph": (torch.ones(2, requires_grad=True) * 2, lambda kept: kept.data.add_(1)),
    "list": ([0], lambda kept: kept.append(1)),
    "dict": ({"n": 0}, lambda kept: kept.update(n=1)),
    "order of a dict": ({"a": 0, "b": 1}, lambda kept: kept.update(a=kept.pop("a"))),
    "order of another": (recent(), set_recent),
    "counter": (Counter("aab"), lambda kept: kept.update("b")),
    "set": ({0}, lambda kept: kept.add(len(kept))),
    "deque": (deque([0], maxlen=2), lambda kept: kept.append(1)),
    "bytes": (bytearray(2), lambda kept: kept.append(1)),
    "array": (np.zeros(2), lambda kept: kept.__iadd__(1)),
    "namespace": (SimpleNamespace(n=0), lambda kept: vars(kept).update(n=kept.n + 1, m=0)),
    "user's dict": (UserDict(n=0), lambda kept: kept.update(n=1)),
    "user's object": (Options(), lambda kept: vars(kept).update(calls=kept.calls + 1)),
    "tensor in a list": ([torch.zeros(2)], lambda kept: kept[0].add_(1)),
    "tensor in a dict": ({"t": torch.zeros(2)}, lambda kept: kept["t"].add_(1)),
    "list in a list": ([[0]], lambda kept: kept[0].append(1)),
    "list in a tuple": (([0],), lambda kept: kept[0].append(1)),
    "dict in a dict": ({"a": {"n": 0}}, lambda kept: kept["a"].update(n=1)),
    "list in an object": (Options(), lambda kept: kept.seen.append(1)),
    "array in dicts": ({"a": {"b": np.zeros(2)}}, lambda kept: kept["a"]["b"].fill(1)),
    "module in a list": ([nn.BatchNorm1d(WIDTH)], lambda kept: kept[0](torch.ones(2, WIDTH))),
}


def shown(kept: Any) -> str:
    """All that a user can see in it, with the values of modules."""
    modules = kept if isinstance(kept, list) and isinstance(kept[0], nn.Module) else []
    return repr((kept, [module.state_dict() for module in modules]))


@pytest.mark.parametrize("name", CHANGES)
def test_a_recording_leaves_no_trace(name: str) -> None:
    kept, change = CHANGES[name]
    changes: list[int] = []

    def noted(kept: Any) -> None:
        change(kept)
        changes.append(1)

    model, before = Around(Stateful(kept, noted)), shown(kept)
    Traced(model, ((torch.randn(2, WIDTH),), {}), 2)
    assert changes
    assert model.inner.kept is kept
    assert shown(kept) == before


def test_the_change_is_one() -> None:
    """Otherwise the test above shows nothing."""
    for kept, change in CHANGES.values():
        before = shown(kept)
        holders = holders_of([Stateful(kept, change)])
        state = HeldContents(holders)
        change(kept)
        assert shown(kept) != before
        for _ in range(2):
            state.put_back()
            assert shown(kept) == before


def test_buffers_and_attributes_are_the_same_objects_again() -> None:
    module = Stateful([0], lambda _: None)
    buffer, kept = module.buffer, module.kept
    with KeptState(module.modules()).kept():
        module.buffer = module.buffer + 1
        buffer.sub_(1)
        module.kept, module.other = [1], 2
        kept.append(3)
    assert module.buffer is buffer
    assert torch.equal(buffer, torch.zeros(2))
    assert module.kept is kept
    assert kept == [0]
    assert not hasattr(module, "other")


def test_all_generators_draw_the_same_again() -> None:
    own = torch.Generator(), np.random.default_rng(0), random.Random(0)
    module = Stateful(own, lambda _: None)

    def drawn() -> list[float]:
        of_torch = torch.rand((), generator=own[0]).item()
        others = own[1].random(), own[2].random()
        return [torch.rand(()).item(), of_torch, random.random(), np.random.rand(), *others]

    with KeptState(module.modules()).kept():
        first = drawn()
    assert drawn() == first


def test_large_tables_and_data_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_MOST_BYTES", 100)
    words = {str(number): [number] for number in range(contents._MOST + 1)}
    data, small = torch.zeros(100), torch.zeros(2)
    module = Stateful([words, data, small], lambda _: None)
    state = HeldContents(holders_of([module]))
    words["0"].append(1)
    for tensor in (data, small):
        tensor.add_(1)
    state.put_back()
    assert words["0"] == [0, 1]
    assert data.sum() == 100
    assert small.sum() == 0


def test_memory_that_cannot_be_written_is_not() -> None:
    """The memory of a file that is open for reading, which a write would end the process for."""
    array = np.frombuffer(bytes(16), dtype=np.float32)
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(array)
    written: list[Tensor] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.copy_:
                written.append(args[0])
            return func(*args, **(kwargs or {}))

    module = Stateful([array, tensor], lambda _: None)
    with KeptState(module.modules()).kept(), Watched():
        pass
    assert not written


def test_odd_objects_are_left_alone() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

    loop: list[Any] = [threading.Lock(), Odd(), type(Odd), np.int64(1), torch.zeros(1).expand(3)]
    loop.append(loop)
    module = Stateful(loop, lambda _: None)
    before = list(loop)
    HeldContents(holders_of([module])).put_back()
    assert all(map(lambda now, then: now is then, loop, before))


def test_a_cache_of_its_own_kind_is_put_back() -> None:
    cache = LeastRecent()
    OrderedDict.__setitem__(cache, "one", 1)
    state = HeldContents(holders_of([Stateful(cache, lambda _: None)]))
    cache["two"] = 2
    state.put_back()
    assert list(cache.items()) == [("one", 1)]
