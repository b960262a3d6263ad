"""The graph of a backward that has failed, which torch's engine still holds."""

from __future__ import annotations

import torch

from ...torch_private import WHOLE, run_backward


def let_go() -> None:
    """Frees the graph of a backward that has failed on this thread.

    Nodes whose turn had not come stay in the engine's queue of the thread, with all that they keep,
    until the thread runs another backward. This is one.
    """
    with torch.inference_mode(False):
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        run_backward((leaf,), (leaf.detach(),), *WHOLE)
