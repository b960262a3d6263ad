"""Each private thing of torch does what pykern takes it for, so that another torch fails here."""

import re
from collections.abc import Callable
from ctypes import CFUNCTYPE, byref, c_char_p, c_int32, c_uint64, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from pykern import torch_private
from pykern.runtime.autograd.graph import saved_by
from pykern.torch_private import NODES_LAST
from pykern.torch_private import profiler as torch_profiler
from tests.support import programs


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2


def test_whether_nodes_of_functions_last_is_as_it_is_told():
    x = torch.ones(2, requires_grad=True)
    node = Doubled.apply(x).grad_fn
    if NODES_LAST:
        assert len(node.next_functions) == 1
    else:
        with pytest.raises(RuntimeError, match="is invalid for this instance"):
            _ = node.next_functions


def test_a_module_keeps_its_hooks_where_they_are_looked_for():
    module = torch.nn.Linear(2, 2)
    assert not any(getattr(module, hooks) for hooks in torch_private.HOOKS)
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    assert all(getattr(module, hooks) for hooks in torch_private.HOOKS)


def test_a_graph_that_reaches_a_leaf_is_seen_as_long_as_it_is_held():
    leaf = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.has_live_graph(leaf)
    kept = (leaf * 2).sum()
    assert torch_private.has_live_graph(leaf)
    kept.backward()
    # The graph's nodes are there, though nothing is saved for them.
    assert torch_private.has_live_graph(leaf)
    del kept
    assert not torch_private.has_live_graph(leaf)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2]


def test_saved_tensors_hooks_are_seen_taken_and_put_back():
    def pack(tensor):
        return tensor

    def unpack(packed):
        return packed

    assert torch_private.top_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.top_hooks() == (pack, unpack)
        torch_private.pop_hooks()
        assert torch_private.top_hooks() is None
        torch_private.push_hooks(pack, unpack)
    assert torch_private.top_hooks() is None


def test_a_refusal_of_hooks_is_told():
    assert torch_private.hooks_refused() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch_private.hooks_refused() == "not here"


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(torch_private.DispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        type(self).seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_are_seen_and_pushed_bare():
    with Functions() as functions, Dispatches() as dispatches:
        assert torch_private.function_modes() == [functions]
        assert torch_private.dispatch_modes() == [dispatches]
    torch_private.push_function_mode(functions)
    torch_private.push_dispatch_mode(dispatches)
    before = Dispatches.seen
    _ = torch.ones(2) + 1
    assert Dispatches.seen > before
    torch_private.pop_dispatch_mode()
    torch_private.pop_function_mode()
    assert torch_private.function_modes() == torch_private.dispatch_modes() == []


def test_threads_of_backwards_and_gradients_are_set():
    assert torch_private.multithreading()
    torch_private.set_multithreading(False)
    assert not torch_private.multithreading()
    torch_private.set_multithreading(True)
    torch_private.set_grad(False)
    assert not torch.is_grad_enabled()
    torch_private.set_grad(True)
    assert torch.is_grad_enabled()


def test_holders_of_a_storage_are_counted():
    x = torch.ones(2)
    alone = torch_private.num_holders(x)
    view = x.view(2)
    assert torch_private.num_holders(x) == alone + 1
    assert view._is_view()


def test_hooks_of_a_leaf_lie_in_a_mapping_that_may_be_given():
    x = torch.ones(2, requires_grad=True)
    assert x._backward_hooks is None
    seen: list[Tensor] = []
    x._backward_hooks = {-1: seen.append}
    (x * 2).sum().backward()
    assert len(seen) == 1


def test_pools_of_captures_can_be_taken_back():
    # Without a GPU they refuse or are not there; release_pool calls them by these names.
    torch_private.release_pool(0, (0, 1))
    if torch.backends.cuda.is_built():
        assert hasattr(torch._C, "_cuda_endAllocateToPool")
        assert hasattr(torch._C, "_cuda_releasePool")


def test_an_exception_out_of_a_checkpoint_leaves_no_hooks():
    def fails(_: Tensor) -> Tensor:
        raise ValueError

    # The exception is held, as by whoever looks at it later.
    with pytest.raises(ValueError) as caught, torch_private.checkpoints_ended():  # noqa: PT011
        checkpoint(fails, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert torch_private.top_hooks() is None
    assert caught.value is not None


def node_of(tensor: Tensor) -> Any:
    return tensor.grad_fn


def test_what_a_node_has_saved_tells_of_hooks_and_what_it_lacks():
    x = torch.ones(2, requires_grad=True)
    # Saved tensors must not outlive their node.
    square, twice = x * x, x * 2.0
    assert [saved.unpack_hook for saved in saved_by(node_of(square))] == [None, None]
    assert len(list(saved_by(node_of(twice)))) < 2
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
        square = x * x
    assert None not in [saved.unpack_hook for saved in saved_by(node_of(square))]


def test_nodes_tell_the_shape_of_a_gradient():
    x = torch.ones(2, 3, requires_grad=True)
    twice = x * 2
    (metadata,) = node_of(twice)._input_metadata
    assert tuple(metadata.shape) == (2, 3)


def test_private_names_of_torchs_c_library_are_used_in_one_package(root):
    users = {
        path.parent.name
        for path in (root / "pykern").rglob("*.py")
        if re.search(r"torch\._C\b|_python_dispatch|import _\w*_mode", path.read_text())
    }
    assert users == {"torch_private"}


def test_holders_of_memory_are_counted():
    tensor = torch.ones(3)
    alone = torch_private.num_holders(tensor)
    assert torch_private.num_holders(torch.empty(1)) == alone
    view = tensor[1:]
    assert torch_private.num_holders(tensor) == alone + 1
    del view
    assert torch_private.num_holders(tensor) == alone


def test_a_hook_of_a_leaf_comes_before_its_gradient_is_kept():
    leaf = torch.ones(2, requires_grad=True)
    came = []

    def hook(gradient):
        came.append(gradient)
        leaf.requires_grad_(False)

    leaf._backward_hooks = {-1: hook}
    (leaf * 2).sum().backward()
    assert [gradient.tolist() for gradient in came] == [[2.0, 2.0]]
    assert leaf.grad is None


def gradients_of(run: Callable[..., object]) -> list[Tensor]:
    """The gradients of two leaves, from two outputs, with the gradients given."""
    torch.manual_seed(0)
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    outputs = (leaves[0] * leaves[1], leaves[0].exp())
    run(outputs, (torch.full((3, 4), 0.3), torch.full((3, 4), 0.7)), *torch_private.WHOLE)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_the_engine_is_called_as_backward_calls_it() -> None:
    assert torch_private.run_backward is not torch_private.checked_backward
    ours, torchs = map(gradients_of, (torch_private.run_backward, torch_private.checked_backward))
    assert len(ours) == len(torchs) == 2
    assert all(map(torch.equal, ours, torchs))


def test_the_engine_adds_to_grad_frees_the_graph_and_makes_none() -> None:
    leaf = torch.ones(2, requires_grad=True)
    squares = [leaf * leaf for _ in range(2)]
    for square in squares:
        torch_private.run_backward((square,), (torch.ones(2),), *torch_private.WHOLE)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 4.0]
    assert not leaf.grad.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        torch_private.run_backward((squares[0],), (torch.ones(2),), *torch_private.WHOLE)


def test_a_torch_without_the_engines_entry_gets_its_own_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    assert torch_private._engine() is torch_private.checked_backward


def test_the_engine_refuses_a_gradient_of_another_shape() -> None:
    """Torch's own checks in Python say it in other words."""
    output = torch.ones(2, requires_grad=True) * 2
    for run in (torch_private.run_backward, torch_private.checked_backward):
        with pytest.raises(RuntimeError, match=r"shape|invalid gradient"):
            run((output,), (torch.ones(3),), *torch_private.WHOLE)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("base", "loads"), [("DispatchMode", False), ("TorchDispatchMode", True)])
def test_operations_under_a_mode_do_not_load_the_compiler(base, loads):
    """With torch's own base they do: otherwise `DispatchMode` could go."""
    program = f"""
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from pykern.torch_private import DispatchMode
class Mode({base}):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))
with Mode():
    torch.ones(2) + 1
print("torch._dynamo" in sys.modules)
"""
    assert programs.run(program, timeout=150).stdout == f"{loads}\n"


def test_writes_of_a_tensor_are_counted():
    tensor = torch.ones(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert torch_private.version_of(torch.ones(2).add_(1)) == 0


def test_holders_are_counted_without_an_object_for_the_storage():
    tensor = torch.ones(3)
    assert torch_private.holders_at(torch_private.storage_of(tensor)) == 1
    view = tensor[1:]
    assert torch_private.holders_at(torch_private.storage_of(view)) == 2
    assert torch_private.num_holders(tensor) == 3


@pytest.mark.parametrize("all_threads", [True, False])
def test_a_profile_is_seen_and_has_ranges_from_c(all_threads):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    first, second = torch_profiler.range_functions()
    start = CFUNCTYPE(c_int32, c_char_p, c_void_p, c_void_p, c_uint64, c_void_p)(first)
    end = CFUNCTYPE(c_int32, c_void_p)(second)
    assert not torch_profiler.is_recording()
    # torch 2.11 warns where it is not told what becomes of a cycle's events.
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, experimental_config=config, acc_events=True) as found:
        assert torch_profiler.is_recording()
        assert torch_profiler.records_all_threads() == all_threads
        handle = c_void_p()
        assert start(b"a range from C", None, None, 0, byref(handle)) == 0
        torch.ones(2) + 1
        assert end(handle) == 0
    assert not torch_profiler.is_recording()
    [event] = [event for event in found.events() if event.name == "a range from C"]
    assert "aten::add" in {child.name for child in event.cpu_children}
