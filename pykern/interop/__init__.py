"""Other libraries' names and formats over pykern's runtime.

The modules follow torch.distributed.pipelining, which changes with every torch release.
"""

import torch

OLDEST_TORCH = "2.13"

if torch.__version__ < OLDEST_TORCH:
    raise ImportError(
        f"torch must be {OLDEST_TORCH} or newer for pykern.interop, which follows its "
        f"torch.distributed.pipelining, got {torch.__version__}. Use pykern.Pipeline, or another "
        "torch"
    )
