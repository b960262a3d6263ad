"""torch.compile for the oracle's GPU: what Inductor asks of CUDA beside the oracle's answers.

Dynamo, AOTAutograd and Inductor are torch's own, and so are the kernels that they write and the
code that calls these. The interpreter executes each launch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.beside.observed import Observed

codecache: Any = importlib.import_module("torch._inductor.codecache")
async_compile: Any = importlib.import_module("torch._inductor.async_compile")
config: Any = importlib.import_module("torch._inductor.config")
triton_helpers: Any = importlib.import_module("torch._inductor.runtime.triton_helpers")
interface: Any = importlib.import_module("torch._dynamo.device_interface")

# The driver tells these properties of an H100 SXM.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    warp_size=32,
    gcnArchName="",
)


class Kernel:
    """A kernel that Inductor wrote, in the place of the one that times its configurations.

    Without a GPU nothing can be timed: of the configurations that Inductor would time, the one that
    moves the fewest bytes runs last, and counts.
    """

    def __init__(self, seen: Observed, name: str, source: str) -> None:
        self._seen = seen
        self._name = name
        self._heuristics = codecache._load_triton_kernel_from_source(name, source)
        self._compiled = [
            (config, self._heuristics._precompile_config(config).kernel)
            for config in self._heuristics.configs
        ]

    def run(self, *given: Any, stream: Any, **_: Any) -> None:
        del stream
        session = self._seen.session
        tensors = [x for x in given if isinstance(x, Tensor)]
        before = [session._content(x).copy() for x in tensors]
        arguments = dict(zip(self._heuristics.fn.arg_names, given, strict=False))

        def execute(form: tuple[Any, Any]) -> tuple[int, int]:
            """The bytes and the instructions of an execution, from the same arguments."""
            for tensor, content in zip(tensors, before, strict=True):
                session._content(tensor)[:] = content
            chosen, compiled = form
            _, grid = self._heuristics._interpret_args_grid(given, chosen)
            session.execute(self._name, compiled, grid, arguments)
            counts = session.executed[-1].counts
            return counts.loaded + counts.stored, counts.warps

        tried = []
        for form in self._compiled:
            tried.append(execute(form))
            session.executed.pop()
        execute(self._compiled[tried.index(min(tried))])
        self._seen.num_forms = max(self._seen.num_forms, len(tried))


@contextmanager
def compiling(seen: Observed) -> Iterator[None]:
    """Within it torch.compile makes functions for the GPU."""
    cuda, known = torch.cuda, interface.CudaInterface

    def kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        assert device_str == "cuda"
        return Kernel(seen, name, source)

    # Targets are right, so what stops a kernel if one is not is left out.
    options = {"compile_threads": 1, "assert_indirect_indexing": False}
    options |= {"force_disable_caches": True, "use_static_triton_launcher": False}
    with pytest.MonkeyPatch.context() as patch, config.patch(options):
        # The session's driver stays.
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(async_compile.AsyncCompile, "triton", kernel)
        patch.setattr(cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
        patch.setattr(cuda, "set_rng_state", lambda *_: None)
        patch.setattr(cuda, "get_device_properties", lambda _=None: H100)
        patch.setattr(known, "get_device_properties", staticmethod(lambda _=None: H100))
        patch.setattr(known, "get_compute_capability", staticmethod(lambda _=None: 90))
        patch.setattr(known, "current_device", staticmethod(cuda.current_device))
        patch.setattr(known, "device", cuda.device)
        patch.setattr(known, "get_raw_stream", staticmethod(lambda _: 0))
        guards: Any = torch._C._dynamo.guards
        patch.setattr(guards, "_empty_strided_cuda", _empty_strided, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
        patch.setattr(cuda, "_DeviceGuard", cuda.device)
        yield


def _empty_strided(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
