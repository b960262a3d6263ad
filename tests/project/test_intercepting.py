"""Operations that may draw are intercepted, on each thread by its own interceptor."""

import sys
import threading

import pytest
import torch

from pykern import torch_private
from pykern.torch_private import intercepting


class Draws(torch_private.Interceptor):
    """Notes what it is asked, and in front of which interceptor."""

    def __init__(self):
        self.asked = []

    def draw(self, func, args, kwargs):
        self.asked.append((str(func), torch_private.interceptor()))
        return func(*args, **kwargs)


def test_operations_that_may_draw_are_intercepted_and_no_others():
    torch_private.watch_draws()
    x = torch.ones(4, requires_grad=True)
    with Draws() as outer, Draws() as inner:
        assert torch_private.interceptor() is inner
        torch.manual_seed(3)
        y = torch.nn.functional.dropout(x * 2, 0.5)
        torch.rand(2)
        y.sum().backward()
    assert torch_private.interceptor() is None
    names = ["aten.bernoulli_.float", "aten.rand.default"]
    assert inner.asked == [(name, outer) for name in names]
    assert outer.asked == [(name, None) for name in names]
    torch.manual_seed(3)
    assert torch.equal(y, torch.nn.functional.dropout(x * 2, 0.5))
    torch.rand(2)
    assert len(inner.asked) == len(names)


class Gives(Draws):
    """Has a generator for those that take one."""

    generator = torch.Generator()

    def draw(self, func, args, kwargs):
        kwargs.setdefault("generator", self.generator)
        return super().draw(func, args, kwargs)


def test_a_generator_is_given_without_asking_where_that_is_all():
    torch_private.watch_draws()
    x = torch.zeros(64)
    Gives.generator.manual_seed(1)
    with Gives() as gives:
        x.bernoulli_(0.5)
        assert gives.asked == []
        same = torch.Generator().manual_seed(1)
        assert torch.equal(x, torch.zeros(64).bernoulli_(0.5, generator=same))
        gives.asked.clear()
        x.bernoulli_(0.5, generator=torch.Generator())
        with torch.no_grad():
            torch.nn.Parameter(torch.zeros(64)).bernoulli_(0.5)
    name = "aten.bernoulli_.float"
    assert gives.asked == [(name, None)] * 2
    with Draws() as outer:
        with Gives() as gives:
            x.bernoulli_(0.5)
        assert gives.asked == []
        assert outer.asked == [(name, None)]
        x.bernoulli_(0.5)
    assert outer.asked == [(name, None)] * 2


@pytest.mark.parametrize("is_initialized", [False, True])
def test_nothing_is_carried_without_a_gpu(monkeypatch, is_initialized):
    """Every node of every backward would pay for it."""
    monkeypatch.setattr(intercepting, "_carry", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    # Other tests may have compiled some.
    monkeypatch.setattr(intercepting, "_scripts", torch._C.CompilationUnit())
    found = []

    def draw():
        torch_private.watch_draws()
        with Draws():
            torch.rand(2)
        found.append(torch._C._is_key_in_tls("pykern"))

    # A thread keeps what was carried to it once.
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert found == [is_initialized]


def test_a_thread_of_autograd_has_the_interceptor_that_was_carried_there(monkeypatch):
    torch_private.watch_draws()
    monkeypatch.setattr(intercepting, "_carry", [intercepting._carrying()])
    carried = torch._C._get_obj_in_tls
    found = []
    with Draws() as draws:
        assert carried("pykern") is draws
        with Draws() as inner:
            assert carried("pykern") is inner
        assert carried("pykern") is draws

        def as_torch_does():
            torch._C._stash_obj_in_tls("pykern", draws)
            intercepting.include(intercepting.key, True)
            torch.rand(2)
            found.append(torch_private.interceptor())

        thread = threading.Thread(target=as_torch_does)
        thread.start()
        thread.join()
    assert carried("pykern") is None
    assert draws.asked == [("aten.rand.default", None)]
    assert found == [None]


def test_a_draw_on_another_thread_of_torch_is_refused(monkeypatch):
    """The key comes to it as well, as to a checkpoint within sixty reentrant ones."""
    torch_private.watch_draws()
    monkeypatch.setattr(intercepting, "_carry", [])
    found = []

    def as_torch_does():
        intercepting.include(intercepting.key, True)
        with pytest.raises(RuntimeError, match="must draw on the thread that runs the stage"):
            torch.rand(2)
        found.append(True)

    thread = threading.Thread(target=as_torch_does)
    thread.start()
    thread.join()
    assert found


@pytest.mark.parametrize("on_gpus", [False, True])
def test_an_interceptor_is_held_as_long_as_it_is_in_force_and_no_longer(on_gpus, monkeypatch):
    """Torch 2.11 releases a reference that it never took."""
    torch_private.watch_draws()
    monkeypatch.setattr(intercepting, "_carry", [intercepting._carrying()] if on_gpus else [])
    none = sys.getrefcount(None)
    draws = Draws()
    before = sys.getrefcount(draws)
    for _ in range(1000):
        with draws:
            assert sys.getrefcount(draws) > before
            torch.rand(2)
            draws.asked.clear()
    assert sys.getrefcount(draws) == before
    assert abs(sys.getrefcount(None) - none) < 100


def test_what_an_interceptor_raises_comes_out_as_it_is():
    class Refuses(Draws):
        def draw(self, func, args, kwargs):
            raise error

    torch_private.watch_draws()
    error = ValueError("planted")
    with Refuses(), pytest.raises(ValueError, match="planted") as caught:
        torch.rand(2)
    assert caught.value is error
    assert torch_private.interceptor() is None


def test_operations_of_a_library_are_intercepted_from_the_next_look_on(monkeypatch):
    library = torch.library.Library("pykern_test", "DEF")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", lambda x: x.clone(), "CPU")
    with Draws() as draws:
        torch.ops.pykern_test.noise(torch.ones(2))
        assert draws.asked == []
        monkeypatch.setitem(sys.modules, "a_module_with_operations", None)
        torch_private.watch_draws()
        torch.ops.pykern_test.noise(torch.ones(2))
    assert draws.asked == [("pykern_test.noise.default", None)]


def test_an_interceptor_goes_where_torch_runs_a_backward():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0] + torch.rand(())

    torch_private.watch_draws()
    with Draws() as draws:
        Noisy.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert [name for name, _ in draws.asked] == ["aten.rand.default"]
