"""Refuses an import of what follows torch.distributed.pipelining if that is too old.

torch.distributed.pipelining changes with every torch release. Modules that follow it import this
one before they import from it.
"""

import torch

OLDEST_TORCH = "2.13"

if torch.__version__ < OLDEST_TORCH:
    raise ImportError(
        f"torch must be {OLDEST_TORCH} or newer for pykern.interop.pipelining, which follows its "
        f"torch.distributed.pipelining, got {torch.__version__}. Use pykern.Pipeline, or another "
        "torch"
    )
