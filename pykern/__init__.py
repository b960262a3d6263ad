"""Pipeline-parallel runtime for PyTorch in one process.

`pykern.plan` and `pykern.schedules` need no torch, so the names that do are imported when first
used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _C

if TYPE_CHECKING:
    from .budget import Budget
    from .optimizers.clipping import clip_grad_norm_
    from .optimizers.host import HostOptimizer
    from .optimizers.zero import ZeroOptimizer
    from .parallel.peers.errors import PeerError
    from .partition.on_devices import on_its_devices
    from .partition.report import explain_cut
    from .pipeline import Pipeline
    from .pipeline.asynchronous import AsyncPipeline
    from .plan import Plan, PlanError
    from .runtime.devices import Device
    from .runtime.microbatch import SplitError
    from .runtime.timeout import PipelineStalled
    from .sizes import estimate
    from .trace import CutError
    from .tuning import Choice, TuneInterrupted, tune
    from .verify import Verify, VerifyError

# The number of hardware queues, 8 by default. With more streams than queues the results are right,
# but kernels wait for unrelated kernels. The driver reads the variable when CUDA begins in a
# process, by `model.cuda()`, say, before there is a pipeline.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

__version__ = "0.1.0"

__all__ = [
    "AsyncPipeline",
    "Budget",
    "Choice",
    "CutError",
    "Device",
    "HostOptimizer",
    "PeerError",
    "Pipeline",
    "PipelineStalled",
    "Plan",
    "PlanError",
    "SplitError",
    "TuneInterrupted",
    "Verify",
    "VerifyError",
    "ZeroOptimizer",
    "clip_grad_norm_",
    "estimate",
    "explain_cut",
    "on_its_devices",
    "tune",
]

_HOME = {
    "AsyncPipeline": ".pipeline.asynchronous",
    "Budget": ".budget",
    "Choice": ".tuning",
    "CutError": ".trace",
    "Device": ".runtime.devices",
    "HostOptimizer": ".optimizers.host",
    "PeerError": ".parallel.peers.errors",
    "Pipeline": ".pipeline",
    "PipelineStalled": ".runtime.timeout",
    "Plan": ".plan",
    "PlanError": ".plan",
    "SplitError": ".runtime.microbatch",
    "TuneInterrupted": ".tuning",
    "Verify": ".verify",
    "VerifyError": ".verify",
    "ZeroOptimizer": ".optimizers.zero",
    "clip_grad_norm_": ".optimizers.clipping",
    "estimate": ".sizes",
    "explain_cut": ".partition.report",
    "on_its_devices": ".partition.on_devices",
    "tune": ".tuning",
}


# The packages for users, which `import pykern` gives as `import torch` gives `torch.nn`.
_PACKAGES = frozenset(
    [
        "benchmark",
        "boxes",
        "checkpoint",
        "doctor",
        "interop",
        "kernels",
        "kineto",
        "models",
        "nsight",
        "partition",
        "plan",
        "rehearse",
        "scale",
        "schedules",
        "search",
        "topo",
    ]
)


def _to_torch(self: _C.Plan, *args: Any, **options: Any) -> Any:
    """A schedule of torch.distributed.pipelining that runs the plan.

    See `pykern.interop.torch_runtime.to_torch`, which imports torch.
    """
    return import_module(".interop.torch_runtime", __name__).to_torch(self, *args, **options)


# A method of plans that is above all that plans know: only the package itself sees both.
_C.Plan.to_torch = _to_torch  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'pykern' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
