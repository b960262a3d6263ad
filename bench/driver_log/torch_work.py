"""Work that torch issues, by the bytes that it touches: the calls alone do not say what they order.

A mode of torch sees its operations, but no kernels of other makers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.tensors.trees import all_tensors

Access = tuple[str, int, int]  # r or w, address, bytes
Tell = Callable[[str], None]
_TOUCH_NOTHING = "empty", "new_empty", "detach", "set_", "is_"


class TorchWork(TorchDispatchMode):
    """Hands on what each operation reads and writes on GPUs."""

    def __init__(self, see: Callable[[str, list[Access]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(_TOUCH_NOTHING):
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            reads, writes = _ranges((args, kwargs)), _ranges((result, written))
            kinds = {**dict.fromkeys(reads, "r"), **dict.fromkeys(writes, "w")}
            if kinds:
                self._see(name, [(kind, *place) for place, kind in kinds.items()])
        return result


def on_streams(tell: Tell) -> TorchWork:
    """Tells of operations by the stream that is current when they are called."""

    def see(name: str, accesses: list[Access]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        tell(f"work {name} stream@{stream:x}{_text(accesses)}")

    return TorchWork(see)


@contextmanager
def host_waits(tell: Tell) -> Iterator[None]:
    """Within it, tells where the host waits for the whole GPU."""
    waits = torch.cuda.synchronize

    def synchronize(device: Any = None) -> None:
        waits(device)
        tell("synchronized")

    with mock.patch.object(torch.cuda, "synchronize", synchronize):
        yield


@contextmanager
def in_graphs(tell: Tell) -> Iterator[None]:
    """Within it, tells of each graph that torch captures what its operations touch."""
    kind: Any = torch.cuda.CUDAGraph
    begin, end, raw, raw_exec = (
        getattr(kind, name)
        for name in ("capture_begin", "capture_end", "raw_cuda_graph", "raw_cuda_graph_exec")
    )
    modes: dict[int, TorchWork] = {}
    touched: dict[int, list[Access]] = {}

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        accesses = touched[id(self)] = []
        modes[id(self)] = TorchWork(lambda _, those: accesses.extend(those))
        modes[id(self)].__enter__()

    def capture_end(self: Any) -> None:
        # A capture that failed is ended once more.
        if mode := modes.pop(id(self), None):
            mode.__exit__(None, None, None)
        end(self)

    def raw_cuda_graph(self: Any) -> int:
        return told("graph", self, raw(self))

    def raw_cuda_graph_exec(self: Any) -> int:
        return told("exec", self, raw_exec(self))

    def told(what: str, graph: Any, handle: int) -> int:
        # In the order in which they were seen, each once.
        tell(f"captured *{what}@{handle:x}{_text(list(dict.fromkeys(touched[id(graph)])))}")
        return handle

    with ExitStack() as replaced:
        for function in (capture_begin, capture_end, raw_cuda_graph, raw_cuda_graph_exec):
            replaced.enter_context(mock.patch.object(kind, function.__name__, function))
        yield


def _ranges(tree: Any) -> list[tuple[int, int]]:
    """From the first byte of each tensor on a GPU to its last."""
    tensors = [tensor for tensor in all_tensors(tree) if tensor.is_cuda and tensor.numel()]
    return [(tensor.data_ptr(), _num_bytes(tensor)) for tensor in tensors]


def _num_bytes(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _text(accesses: list[Access]) -> str:
    return "".join(f" {kind} buffer@{address:x}:{size}" for kind, address, size in accesses)
